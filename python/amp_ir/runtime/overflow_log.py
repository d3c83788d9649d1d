# SPDX-License-Identifier: Apache-2.0
"""The log of overflows: why a loss scale falls below a limit, said at the step that does it."""

from __future__ import annotations

from typing import Any

import torch

from amp_ir.errors import OptionError
from amp_ir.runtime.step import CompiledStep
from amp_ir.runtime.step_variants import log

CHOICES = (None, "explain")


class OverflowLog:
    """Explains skipped steps in Python's logger "amp_ir", at level WARNING.

    Every step is asked whether it was skipped, which on a GPU waits for it.
    """

    def __init__(self, below: float) -> None:
        self._below = below

    def after_step(self, program: CompiledStep, tensors: list[torch.Tensor]) -> None:
        """Explain the step that a program just did on a flat batch, if its scale fell too low."""
        if not program.skipped:
            return
        fallen = [pair for pair in _scales(program) if pair[1] < min(pair[0], self._below)]
        if fallen:
            before, now = min(fallen, key=lambda pair: pair[1])
            found = program.find_overflow_in(tensors)
            log.warning(
                "a step was skipped, and its loss scale fell from %g to %g:\n%s", before, now, found
            )


def overflow_log(on_overflow: Any, below: Any) -> OverflowLog | None:
    """Return what the options of `jit` ask for.

    Raises:
        OptionError: an option has a value that it does not accept.
    """
    if on_overflow not in CHOICES:
        accepted = " or ".join(map(repr, CHOICES))
        raise OptionError(f"on_overflow={on_overflow!r} is not known; expected {accepted}")
    is_number = isinstance(below, int | float) and not isinstance(below, bool)
    if not (is_number and below > 0):
        raise OptionError(f"explain_below={below!r} is not a loss scale; expected a number above 0")
    return None if on_overflow is None else OverflowLog(float(below))


def _scales(program: CompiledStep) -> list[tuple[float, float]]:
    """Return the scale that the last step used and the one now, of each scaler that skipped."""
    state: Any = program.module.state
    records = [one.last() for one in program.logs]
    return [
        (record.scale, float(state[f"scaler{k}.scale"]))
        for k, record in enumerate(records)
        if record is not None and record.skipped
    ]
