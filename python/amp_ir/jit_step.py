# SPDX-License-Identifier: Apache-2.0
"""`amp_ir.jit`: a step that is captured, cast and compiled when it is first called."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from amp_ir.errors import OptionError, ShapeChanged, StateError
from amp_ir.frontend import trace
from amp_ir.module import Role
from amp_ir.pipeline import Models, Optimizers, autocast, compile_step, trace_step
from amp_ir.runtime.step import CompiledStep, refuse_names
from amp_ir.step_log import StepRecord
from amp_ir.step_options import check_budget, check_opt_level, check_rounding
from amp_ir.target import target_of


class JitStep:
    """A step that is captured, cast and compiled at its first call, and again for a new shape."""

    def __init__(self, step: Callable[..., Any], **options: Any) -> None:
        self._step = step
        self._amp_dtype = options.pop("amp_dtype")
        self._compile_options = options.pop("compile_options")
        self._trace_options = options
        self._compiled: list[CompiledStep] = []
        # One for all shapes: the second shape's dropout goes on where the first one's is.
        self._random_state: torch.Tensor | None = None

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Run one step, compiling first if no compiled one fits the batch's shapes."""
        refuse_names(named)
        self._compiled = [one for one in self._compiled if one.module.hooks.is_current()]
        for compiled in self._compiled:
            with contextlib.suppress(ShapeChanged):
                compiled.module.signature.flatten_batch(batch)
                return compiled(*batch)
        return self._compile(batch)(*batch)

    @property
    def compiled(self) -> CompiledStep | None:
        """The step compiled last; None before the first call."""
        return self._compiled[-1] if self._compiled else None

    @property
    def last(self) -> StepRecord:
        """As `CompiledStep.last`.

        Raises:
            StateError: the step has no loss scaler, or has not run yet.
        """
        if self.compiled is None:
            raise StateError("the step has not run yet; call it first")
        return self.compiled.last

    @property
    def skipped(self) -> bool:
        """As `CompiledStep.skipped`; False before the first call."""
        return self.compiled is not None and self.compiled.skipped

    def state_dict(self) -> dict[str, torch.Tensor]:
        """As `CompiledStep.state_dict`; before the first call what was loaded, or nothing."""
        return {} if self._random_state is None else {"random_state": self._random_state.clone()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """As `CompiledStep.load_state_dict`, also before the first call."""
        if "random_state" not in state:
            return
        if self._random_state is None:
            self._random_state = state["random_state"].clone()
        else:
            self._random_state.copy_(state["random_state"])

    def _compile(self, batch: tuple[Any, ...]) -> CompiledStep:
        started = time.perf_counter()
        mod, args = trace_step(self._step, batch, **self._trace_options)
        if self._random_state is None:
            self._random_state = mod.random_state
        else:
            mod = mod.with_random_state(self._random_state)
        if self._amp_dtype is not None:
            mod = autocast(mod, args, amp_dtype=self._amp_dtype)
        compiled = compile_step(mod, **self._compile_options)
        seconds = time.perf_counter() - started
        if self._compiled:
            shapes = [list(s.shape) for s in mod.signature.inputs if s.role is Role.BATCH]
            print(
                f"amp_ir: compiled again for batch shapes {shapes} ({seconds:.1f} s)",
                file=sys.stderr,
            )
        self._compiled.append(compiled)
        return compiled


def jit(
    step: Callable[..., Any],
    *,
    model: Models,
    optimizer: Optimizers = None,
    scaler: Any = None,
    amp_dtype: str | None = None,
    device: str = "cpu",
    opt_level: int = 3,
    rounding: str = "fast",
    memory_budget: int | None = None,
) -> JitStep:
    """Capture, cast and compile `step` when it is first called.

    A batch of another shape compiles again, with a one-line notice, and is kept. `amp_dtype` is
    "float16", "bfloat16" or None for no casts; `rounding` and `memory_budget` are as for `compile`.

    Raises:
        OptionError, DeviceError, ArgumentError: at once, for what no batch could make right.
    """
    if amp_dtype not in (None, "float16", "bfloat16", "float32"):
        raise OptionError(
            f'amp_dtype={amp_dtype!r} is not supported; expected "float16", "bfloat16", "float32" '
            "or None for no casts"
        )
    check_rounding(rounding)
    check_budget(memory_budget)
    check_opt_level(opt_level)
    target_of(device)
    trace.check_training(step, model, optimizer, scaler)
    return JitStep(
        step,
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        amp_dtype=amp_dtype,
        compile_options={
            "device": device,
            "opt_level": opt_level,
            "rounding": rounding,
            "memory_budget": memory_budget,
        },
    )
