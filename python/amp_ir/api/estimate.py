# SPDX-License-Identifier: Apache-2.0
"""Estimated time of a planned step: the arithmetic and bytes of its calls at a machine's peaks."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from amp_ir.api.compile import lower
from amp_ir.host.peak_rates import MachinePeaks
from amp_ir.ir.memory_plan import PlannedCall
from amp_ir.ir.step_module import StepModule
from amp_ir.ir.target import parse_target
from amp_ir.memory.call_cost import flop_of_calls


@attrs.frozen
class EstimatedCall:
    """One kernel or library call: its arithmetic, bytes, and time at the machine's peaks."""

    call: PlannedCall
    flop: int
    milliseconds: float

    @property
    def nbytes(self) -> int:
        """Return the bytes that it reads and writes."""
        return self.call.read_nbytes + self.call.written_nbytes


@attrs.frozen
class StepEstimate:
    """The calls of a planned step; nothing was compiled or run."""

    calls: tuple[EstimatedCall, ...] = attrs.field(repr=False)
    peak_nbytes: int

    @property
    def milliseconds(self) -> float:
        """Return the time of all calls at the machine's peaks."""
        return sum(one.milliseconds for one in self.calls)

    def milliseconds_of(self) -> dict[tuple[str, str, str], float]:
        """Return the time of the calls that compute an op, by its name, module and phase."""
        found: dict[tuple[str, str, str], float] = {}
        for one in self.calls:
            for place in one.call.locations:
                for op in one.call.ops:
                    key = op, place.module, place.phase
                    found[key] = found.get(key, 0.0) + one.milliseconds
        return found


def estimate_step(mod: StepModule, peaks: MachinePeaks, target: str = "cpu") -> StepEstimate:
    """Plan a step for a target and estimate its time at a machine's peaks."""
    planned = lower(mod, target=parse_target(target))
    return StepEstimate(
        tuple(_calls(planned.plan.calls, flop_of_calls(planned), peaks)), planned.plan.peak_bytes
    )


def _calls(
    calls: tuple[PlannedCall, ...], flop: tuple[int, ...], peaks: MachinePeaks
) -> Iterator[EstimatedCall]:
    for call, count in zip(calls, flop, strict=True):
        nbytes = call.read_nbytes + call.written_nbytes
        least = peaks.speed_of_light_milliseconds(count, nbytes, call.compute_dtype)
        yield EstimatedCall(call, count, least)
