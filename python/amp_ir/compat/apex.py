# SPDX-License-Identifier: Apache-2.0
"""NVIDIA apex's handle: `init`, `scale_loss` and `wrap_optimizer`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from amp_ir.api import Models
from amp_ir.errors import OptionError
from amp_ir.jit_function import jit as jit_step
from amp_ir.jit_step import JitStep
from amp_ir.loss_scaling.grad_scaler import GradScaler
from amp_ir.loss_scaling.scale_loss import losses_before_step, own_scaler, scale_loss


def init(
    enabled: bool = True,  # noqa: FBT001, FBT002 - apex's own signature
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,  # noqa: FBT001, FBT002
    verbose: bool = False,  # noqa: FBT001, FBT002
) -> AmpHandle:
    """Make the handle. Nothing is patched: `AmpHandle.jit` compiles the step with casts.

    Args:
        enabled: if False, `scale_loss` passes the loss through and `jit` inserts no casts.
        loss_scale: "dynamic", or a number, a power of two, that stays; it skips overflows too.
        enable_caching: accepted, and without effect: a compiled step casts a weight once for all
            that read it, and a cast cannot be older than the weight.
        verbose: print every cast by the path of its module when a step is compiled.

    Raises:
        OptionError: `loss_scale` is neither "dynamic" nor a power of two.
    """
    del enable_caching
    if not isinstance(loss_scale, (int, float)) and loss_scale != "dynamic":
        raise OptionError(f'loss_scale={loss_scale!r}; expected "dynamic" or a power of two')
    handle = AmpHandle(enabled=enabled, loss_scale=loss_scale, verbose=verbose)
    handle.new_scaler("cpu")
    return handle


class AmpHandle:
    """apex's handle: the options of `init`, and loss scalers made with them."""

    def __init__(self, *, enabled: bool, loss_scale: float | str, verbose: bool) -> None:
        self.enabled, self.loss_scale, self.verbose = enabled, loss_scale, verbose

    def new_scaler(self, device: str) -> GradScaler:
        """Return a new loss scaler with the handle's options."""
        if self.loss_scale == "dynamic":
            return GradScaler(device, enabled=self.enabled)
        scale = float(self.loss_scale)
        return GradScaler(device, init_scale=scale, enabled=self.enabled, dynamic=False)

    @contextlib.contextmanager
    def scale_loss(
        self, loss: torch.Tensor, optimizer: torch.optim.Optimizer, *, loss_id: int = 0
    ) -> Iterator[torch.Tensor]:
        """Scale a loss for its backward pass, with the optimizer's own scaler.

        The gradients are unscaled when the block ends; the next `optimizer.step()` does nothing
        where one of them is not finite.
        """
        self.add_scaler(optimizer, loss_id)
        with scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
            yield scaled

    def add_scaler(self, optimizer: torch.optim.Optimizer, loss_id: int) -> None:
        """Make the scaler of an optimizer's loss, unless there is one."""
        device = optimizer.param_groups[0]["params"][0].device.type
        own_scaler(optimizer, loss_id, lambda: self.new_scaler(device))

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Return the optimizer with a `scale_loss` of its own, for `num_loss` losses a step."""
        for loss_id in range(num_loss):
            self.add_scaler(optimizer, loss_id)
        return OptimWrapper(optimizer, self, num_loss)

    def jit(
        self,
        step: Callable[..., Any],
        *,
        model: Models,
        optimizer: Any,
        amp_dtype: str | torch.dtype = "float16",
        **options: Any,
    ) -> JitStep:
        """Compile the body of the loop, as `amp_ir.jit` does; wrapped optimizers are taken."""
        given = optimizer if isinstance(optimizer, Sequence) else [optimizer]
        plain = [one.optimizer if isinstance(one, OptimWrapper) else one for one in given]
        for one in plain:
            self.add_scaler(one, 0)
        dtype = amp_dtype if self.enabled else None
        return jit_step(
            step, model=model, optimizer=plain, amp_dtype=dtype, verbose=self.verbose, **options
        )


class OptimWrapper:
    """An optimizer with `scale_loss`, a scaler for each loss; the rest is the optimizer's."""

    def __init__(self, optimizer: torch.optim.Optimizer, handle: AmpHandle, num_loss: int) -> None:
        self.optimizer, self._handle, self._num_loss = optimizer, handle, num_loss

    @contextlib.contextmanager
    def scale_loss(self, loss: torch.Tensor) -> Iterator[torch.Tensor]:
        """Scale the next loss of this step.

        Raises:
            OptionError: there were `num_loss` of them already.
        """
        loss_id = losses_before_step(self.optimizer)
        if loss_id >= self._num_loss:
            raise OptionError(
                f"this is loss {loss_id + 1} before optimizer.step(), and the optimizer was "
                f"wrapped with num_loss={self._num_loss}; pass the number of losses of a step"
            )
        with self._handle.scale_loss(loss, self.optimizer, loss_id=loss_id) as scaled:
            yield scaled

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)
