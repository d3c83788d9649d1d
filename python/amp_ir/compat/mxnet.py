# SPDX-License-Identifier: Apache-2.0
"""Apache MXNet's `amp`: `init`, `init_trainer`, `scale_loss`, `unscale` and the lists of ops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from amp_ir.amp.overrides import Override, QuietOverride
from amp_ir.amp.policies import list_ops
from amp_ir.errors import OptionError
from amp_ir.inference.convert import convert_model
from amp_ir.ir.options import dtype_name
from amp_ir.jit_function import jit
from amp_ir.jit_step import JitStep
from amp_ir.loss_scaling.grad_scaler import GradScaler

__all__ = [
    "Trainer",
    "convert_model",
    "hybridize",
    "init",
    "init_trainer",
    "list_fp32_ops",
    "list_lp16_fp32_ops",
    "list_lp16_ops",
    "scale_loss",
    "unscale",
]

# Names of MXNet's lists, and the ops of a captured step that they mean.
_OPS = {
    "Convolution": ("relax.nn.conv2d", "amp_ir.conv*"),
    "FullyConnected": ("relax.matmul",),
    "dot": ("relax.matmul",),
    "batch_dot": ("relax.matmul",),
    "softmax": ("relax.nn.softmax", "amp_ir.softmax_backward"),
    "log_softmax": ("relax.nn.log_softmax", "amp_ir.log_softmax_backward"),
    "LayerNorm": ("amp_ir.layer_norm*",),
    "BatchNorm": ("amp_ir.batch_norm*",),
}
_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}
_OPTIONS = {"learning_rate": "lr", "wd": "weight_decay"}


@attrs.define
class _Settings:
    target_dtype: str | None = None
    overrides: tuple[Override, ...] = ()


_settings = _Settings()


def init(
    target_dtype: str | torch.dtype = "float16",
    target_precision_ops: Sequence[str] = (),
    fp32_ops: Sequence[str] = (),
) -> None:
    """Choose the dtype and the ops of the steps that `hybridize` compiles; the last call counts.

    Args:
        target_dtype: "float16" or "bfloat16".
        target_precision_ops: ops that read low; MXNet's names, or ours and globs of them.
        fp32_ops: ops that stay in float32.

    Raises:
        OptionError: an op is in both lists, or the dtype is not a low one.
    """
    target_dtype = dtype_name(target_dtype)
    if target_dtype not in ("float16", "bfloat16"):
        raise OptionError(f'target_dtype={target_dtype!r}; expected "float16" or "bfloat16"')
    both = sorted({*target_precision_ops} & {*fp32_ops})
    if both:
        raise OptionError(f"{', '.join(both)}: in target_precision_ops and in fp32_ops; name once")
    low = [QuietOverride(op=name, to="low") for name in _names(target_precision_ops)]
    full = [QuietOverride(op=name, to="float32") for name in _names(fp32_ops)]
    _settings.target_dtype, _settings.overrides = target_dtype, (*low, *full)


def _names(ops: Iterable[str]) -> list[str]:
    return [name for op in ops for name in _OPS.get(op, (op,))]


class Trainer:
    """Gluon's Trainer over an optimizer of PyTorch.

    `step(batch_size)` divides the gradients by `batch_size`, steps, and clears them, since MXNet's
    backward pass writes gradients and PyTorch's adds to them.

    Args:
        params: parameters of the network.
        optimizer: "sgd", "adam", "adamw", "rmsprop", "adagrad", or an optimizer of PyTorch.
        optimizer_params: its options by MXNet's names ("learning_rate", "wd") or PyTorch's.
        update_on_kvstore: accepted; there is no key-value store.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        optimizer: str | torch.optim.Optimizer,
        optimizer_params: Mapping[str, Any] | None = None,
        *,
        update_on_kvstore: bool = False,
    ) -> None:
        del update_on_kvstore
        self.scaler: GradScaler | None = None
        if isinstance(optimizer, torch.optim.Optimizer):
            self.optimizer = optimizer
            return
        if optimizer not in _OPTIMIZERS:
            raise OptionError(
                f"optimizer={optimizer!r}; expected an optimizer of PyTorch or one of "
                f"{', '.join(_OPTIMIZERS)}"
            )
        options = {_OPTIONS.get(key, key): v for key, v in (optimizer_params or {}).items()}
        self.optimizer = _OPTIMIZERS[optimizer](params, **options)

    @property
    def amp_loss_scale(self) -> float:
        """Return the loss scale, 1 for a trainer without one."""
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def step(self, batch_size: int) -> None:
        """Update the parameters, unless a gradient is not finite, and clear the gradients."""
        if batch_size != 1:
            groups = [group["params"] for group in self.optimizer.param_groups]
            for parameter in (one for group in groups for one in group):
                if parameter.grad is not None:
                    parameter.grad.div_(batch_size)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()


def init_trainer(trainer: Trainer) -> None:
    """Give a trainer a dynamic loss scale of its own: 2^16, doubled after 2000 clean steps."""
    if not isinstance(trainer, Trainer):
        raise OptionError(
            f"init_trainer takes an amp_ir.compat.mxnet.Trainer, got {type(trainer).__name__}"
        )
    device = trainer.optimizer.param_groups[0]["params"][0].device.type
    trainer.scaler = GradScaler(device)


def _scaler_of(trainer: Trainer) -> GradScaler:
    if trainer.scaler is None:
        raise OptionError("the trainer has no loss scale; call amp.init_trainer(trainer) first")
    return trainer.scaler


@contextlib.contextmanager
def scale_loss(loss: Any, trainer: Trainer) -> Iterator[Any]:
    """Scale a loss, or a list of losses, by the trainer's scale.

    Raises:
        OptionError: `init_trainer` was not called.
    """
    yield _scaler_of(trainer).scale(loss)


def unscale(trainer: Trainer) -> None:
    """Divide the trainer's gradients by its scale before its step, as clipping needs it."""
    _scaler_of(trainer).unscale_(trainer.optimizer)


def hybridize(
    step: Callable[..., Any], net: torch.nn.Module, trainer: Trainer, **options: Any
) -> JitStep:
    """Compile the body of the loop with the settings of `init`; `options` are those of `jit`."""
    return jit(
        step,
        model=net,
        optimizer=trainer.optimizer,
        scaler=trainer.scaler,
        amp_dtype=_settings.target_dtype,
        overrides=_settings.overrides,
        **options,
    )


def list_lp16_ops() -> list[str]:
    """Return the ops that read low."""
    return [*list_ops(kind="low")]


def list_fp32_ops() -> list[str]:
    """Return the ops that compute and store float32."""
    return [*list_ops(kind="float32")]


def list_lp16_fp32_ops() -> list[str]:
    """Return the ops whose dtype the placement chooses."""
    return [*list_ops(kind="free")]
