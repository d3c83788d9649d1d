# SPDX-License-Identifier: Apache-2.0
"""`AmpIrTrainer`: transformers' Trainer with each optimizer step as one compiled program.

The Trainer's loop calls `training_step` for a batch, then clips, steps the optimizer and clears
gradients. Here `training_step` does all of it for the last batch of an optimizer step; the calls
that follow find nothing left to do, and the loop, its callbacks, logs and checkpoints stay the
Trainer's.
"""

from __future__ import annotations

import os
import types
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import Trainer
from transformers.trainer import SCALER_NAME

import amp_ir
from amp_ir.errors import OptionError, VersionError
from amp_ir.files.atomic_file import atomic_file

_RANDOM_STATE_NAME = "amp_ir_random_state.pt"
# The parts of Trainer's loop that are replaced; 5.20 and 5.23 have them under these names.
_REPLACED = ("_prepare_for_training", "_clip_grad_norm", "_get_grad_norm", "_load_rng_state")
if not all(hasattr(Trainer, name) for name in _REPLACED):
    raise VersionError(
        f"AmpIrTrainer is written for the loop of transformers 5.20 to 5.23, and transformers "
        f"{transformers.__version__} has another one; install 'transformers>=5.20,<5.24', or "
        'compile the model: torch.compile(model, backend="amp_ir")'
    )


class AmpIrTrainer(Trainer):
    """A Trainer that compiles its steps with `amp_ir.jit`; used as Trainer is.

    `TrainingArguments(bf16=True)` and `fp16=True` choose the dtype that amp_ir's rules work with;
    fp16 trains under `amp_ir.GradScaler`. One process, on one device.

    Args:
        args: as Trainer takes them, as are all others.
        jit_options: further options of `amp_ir.jit`: overrides, policy, memory_budget, buckets, ...

    Raises:
        OptionError: the arguments ask for what one compiled step cannot do; names all of it.
    """

    def __init__(
        self, *args: Any, jit_options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._jit_options = dict(jit_options or {})
        self._step: Any = None
        self._grad_norm: torch.Tensor | None = None
        self._filters_losses = False
        super().__init__(*args, **kwargs)
        _check(self)
        self._amp_dtype = {"fp16": "float16", "bf16": "bfloat16"}.get(self.args.mixed_precision)
        self._scaler = amp_ir.GradScaler() if self._amp_dtype == "float16" else None

    @property
    def compiled_step(self) -> Any:
        """The jitted step, as `amp_ir.jit` returns it; None before `train`."""
        return self._step

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        # The casts are amp_ir's, and so is the loss scale.
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        # The loop's own filter reads the loss at every step. `training_step` filters instead.
        self._filters_losses = self.args.logging_nan_inf_filter
        self.args.logging_nan_inf_filter = False
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            self.args.logging_nan_inf_filter = self._filters_losses

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        model = prepared[0]
        if model is not self.model:
            raise OptionError(
                f"the model was wrapped in {type(model).__name__}; AmpIrTrainer compiles the model "
                "itself, on one device of one process: leave out what wraps it, such as "
                "accelerate's dynamo_backend or a _wrap_model of your own"
            )
        device = str(self.args.device)
        options = {"device": device, "amp_dtype": self._amp_dtype, **self._jit_options}
        self._step = amp_ir.jit(
            _step_of(self),
            model=self.model,
            optimizer=_torch_optimizer(self.optimizer),
            scaler=self._scaler,
            **options,
        )
        return prepared

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Create the scheduler as Trainer does, on an optimizer whose step is compiled."""
        # Before a scheduler counts its calls.
        optimizer: Any = self.optimizer
        optimizer.step = types.MethodType(_stepped, optimizer)
        return super().create_scheduler(*args, **kwargs)

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Run one batch, and the optimizer behind the last batch of an optimizer step."""
        model.train()
        optimizer: Any = self.optimizer
        if callable(getattr(optimizer, "train", None)):
            optimizer.train()
        phase = "update" if self.accelerator.sync_gradients else "accumulate"
        batch, divisor = dict(self._prepare_inputs(inputs)), self._divisor(num_items_in_batch)
        loss, self._grad_norm = self._step(batch, num_items_in_batch, divisor, phase)
        if phase == "update" and self._scaler is not None:
            # The loop asks, for the scheduler waits with the step.
            optimizer._is_overflow = self._step.skipped
        return self._filtered(loss)

    def _divisor(self, num_items_in_batch: Any) -> int:
        """Return what the loss of a batch is divided by, so that those of a step add to a mean."""
        is_scaled = self.loss_is_scaled_for_ga
        if is_scaled is None:
            counts = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            is_scaled = counts or self.compute_loss_func is not None
        return 1 if is_scaled else self.current_gradient_accumulation_steps

    def _filtered(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to log: where it is not finite the mean of those since the last log."""
        if not self._filters_losses:
            return loss
        steps = 1 + self.state.global_step - self._globalstep_last_logged
        return torch.where(torch.isfinite(loss), loss, self._tr_loss / steps)

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor | None:
        return self._grad_norm

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> torch.Tensor | None:
        return self._grad_norm

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:  # noqa: FBT001, FBT002
        """Evaluate as Trainer does: in eager PyTorch, under autocast of the same dtype."""
        if self._amp_dtype is None:
            return super().autocast_smart_context_manager(cache_enabled)
        dtype = getattr(torch, self._amp_dtype)
        return torch.autocast(self.args.device.type, dtype, cache_enabled=cache_enabled)

    def _save_scaler(self, output_dir: str) -> None:
        if self._scaler is not None:
            with atomic_file(os.path.join(output_dir, SCALER_NAME)) as file:
                torch.save(self._scaler.state_dict(), file)

    def _load_scaler(self, checkpoint: str | None) -> None:
        path = os.path.join(checkpoint or "", SCALER_NAME)
        if checkpoint is not None and self._scaler is not None and os.path.isfile(path):
            self._scaler.load_state_dict(torch.load(path, weights_only=True))

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # A compiled step draws from a state of its own.
        with atomic_file(os.path.join(output_dir, _RANDOM_STATE_NAME)) as file:
            torch.save(self._step.state_dict(), file)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        path = os.path.join(checkpoint or "", _RANDOM_STATE_NAME)
        if checkpoint is not None and os.path.isfile(path):
            self._step.load_state_dict(torch.load(path, weights_only=True))


def _step_of(trainer: Any) -> Any:
    """Return the step that `amp_ir.jit` compiles."""
    optimizer, scaler = _torch_optimizer(trainer.optimizer), trainer._scaler
    max_grad_norm = trainer.args.max_grad_norm

    def step(
        inputs: dict[str, Any], num_items_in_batch: Any, divisor: int, phase: str
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # `compute_loss` takes labels out of its inputs.
        loss = trainer.compute_loss(
            trainer.model, dict(inputs), num_items_in_batch=num_items_in_batch
        )
        loss = loss / divisor if divisor != 1 else loss
        (loss if scaler is None else scaler.scale(loss)).backward()
        if phase == "accumulate":
            return loss.detach(), None
        if scaler is not None:
            scaler.unscale_(optimizer)
        # Trainer takes the norm of all gradients also where it does not clip.
        bound = max_grad_norm if max_grad_norm and max_grad_norm > 0 else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), bound)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        return loss.detach(), norm

    return step


def _torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside of accelerate's wrapper."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _stepped(_optimizer: Any, _closure: Any = None) -> None:
    """Do nothing: the compiled step has updated the parameters."""


def _check(trainer: Any) -> None:
    """Reject what a compiled step on one device cannot do.

    Raises:
        OptionError: lists all of it.
    """
    args = trainer.args
    wrong = {
        "torch_compile=True": args.torch_compile,
        "deepspeed": trainer.is_deepspeed_enabled,
        "fsdp": trainer.is_fsdp_enabled,
        f"{args.world_size} processes": args.world_size > 1,
        f"{args.n_gpu} GPUs in one process": args.n_gpu > 1,
        f"optim={args.optim!r}, which updates in the backward pass": "lomo" in str(args.optim),
        "torch_empty_cache_steps": args.torch_empty_cache_steps is not None,
    }
    found = [name for name, is_wrong in wrong.items() if is_wrong]
    if found:
        raise OptionError(
            f"AmpIrTrainer compiles the whole step, for one device of one process; it cannot do "
            f"{'; '.join(found)}. Use transformers.Trainer for these, with "
            'torch.compile(model, backend="amp_ir") where that is enough'
        )
