# SPDX-License-Identifier: Apache-2.0
"""The speed-of-light time of a step on this machine, at its current peak rates."""

from __future__ import annotations

from collections.abc import Callable

from amp_ir.api import lower
from amp_ir.host.peak_rates import MachinePeaks, cpu_peaks, cpu_trials
from amp_ir.ir.memory_plan import PlannedStep
from amp_ir.ir.step_module import StepModule
from amp_ir.ir.target import target_of
from amp_ir.memory.call_cost import flop_of_calls
from benchmarks.peers import Step

# Short beside a step, long beside the first call after another program's.
_CALLS_A_TURN = 3


def peak_trials() -> dict[str, Step]:
    """Return `cpu_trials`, a few calls of each, that take turns with steps; see `peaks_of`."""

    def repeated(call: Callable[[], object]) -> Step:
        def run() -> None:
            for _ in range(_CALLS_A_TURN):
                call()

        return run

    return {name: repeated(call) for name, call in cpu_trials().items()}


def peaks_of(milliseconds: dict[str, float]) -> MachinePeaks:
    """Return the peak rates that the seconds of the trials in `peak_trials` imply."""
    seconds = {name: took / _CALLS_A_TURN / 1e3 for name, took in milliseconds.items()}
    return cpu_peaks(seconds, "medians of turns between the steps")


def speed_of_light_milliseconds(mod: StepModule, peaks: MachinePeaks, device: str = "cpu") -> float:
    """Return `planned_speed_of_light` of a step as we compile it."""
    return planned_speed_of_light(lower(mod, target=target_of(device)), peaks)


def planned_speed_of_light(planned: PlannedStep, peaks: MachinePeaks) -> float:
    """Return the speed-of-light time of a step: max(FLOP / matmul rate, bytes / copy rate).

    The sums are over all calls. Arithmetic counts at the rate of its dtype; bytes are those that
    calls read and write, each tensor once per call.
    """
    calls = planned.plan.calls
    arithmetic = sum(
        peaks.speed_of_light_milliseconds(flop, 0, call.compute_dtype)
        for flop, call in zip(flop_of_calls(planned), calls, strict=True)
    )
    nbytes = sum(call.read_nbytes + call.written_nbytes for call in calls)
    return max(arithmetic, peaks.speed_of_light_milliseconds(0, nbytes, "float32"))
