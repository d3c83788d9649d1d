# SPDX-License-Identifier: Apache-2.0
"""Replays of a compiled step on copies of its state, for `CompiledStep.find_overflow`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from amp_ir.amp.overrides import Override, QuietOverride
from amp_ir.api.precision import autocast, stored_variables
from amp_ir.errors import StateError
from amp_ir.host.paused_garbage_collection import paused_garbage_collection
from amp_ir.ir.step_module import StepModule
from amp_ir.runtime.program import Program

if TYPE_CHECKING:
    from amp_ir.replay.overflow import Overflow


def overflow_finder(
    mod: StepModule, program: Program, rounding: str
) -> Callable[[Sequence[torch.Tensor]], Overflow]:
    """Return the function that says where the step on a flat batch stops being finite."""

    @paused_garbage_collection()
    def find(batch: Sequence[torch.Tensor]) -> Overflow:
        from amp_ir.replay.find_overflow import Replay, find_overflow

        if program.exchange is not None:
            raise StateError(
                "find_overflow runs a step again on this rank alone, and this one exchanges "
                "gradients with others; jit the same step without data_parallel= and "
                "DistributedDataParallel in one process, and ask it on this batch"
            )
        replay = Replay(
            mod,
            lambda state: run_on(program, mod, state, batch),
            lambda overrides: with_overrides(mod, overrides),
            stored_variables if rounding == "fast" and mod.plan is not None else None,
        )
        return find_overflow(replay, batch)

    return find


def run_on(
    program: Program, mod: StepModule, state: Mapping[str, Any], batch: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Run a built step on other state, which it writes to; return the outputs of `main`."""
    copy = Program(
        *(program.executable, program.plan, program.signature, state, program.device),
        checks=program.checks,
    )
    copy.check_inputs(batch)
    results: Iterator[torch.Tensor] = iter(copy.run(batch, in_graph=False))
    copy.synchronise()
    inputs = mod.signature.inputs
    return [
        next(results) if spec.updates is None else state[inputs[spec.updates].name]
        for spec in mod.signature.outputs
    ]


def with_overrides(mod: StepModule, overrides: Sequence[Override]) -> StepModule | None:
    """Return the step with casts decided again, with further overrides.

    None for a step that follows a plan, which leaves nothing to decide.
    """
    options = dict(mod.cast_options)
    if options.get("plan") is not None:
        return None
    all_of_them = (*options.get("overrides", ()), *overrides)
    options["overrides"] = tuple(map(QuietOverride.of, all_of_them))
    found: StepModule = autocast(mod.without_casts(), **options)
    return found
