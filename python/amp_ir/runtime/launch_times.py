# SPDX-License-Identifier: Apache-2.0
"""Begin and end times of each kernel and library call of a step on a GPU, by CUDA events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from amp_ir.runtime.call_times import StepTimes, check_seen
from amp_ir.runtime.profile import check_counts, time_program
from amp_ir.runtime.program import Program

# The GPU is kept busy while a step is handed to it: then its calls are in the queue one after
# another, and the time between two events is a call's own and not the host's.
_LEAD = 2.0
_MOST_LEAD_SECONDS = 0.1
# Of a busy GPU; a slower clock makes the lead longer, which costs nothing but time.
_CYCLES_A_SECOND = 2e9


@attrs.frozen
class LaunchTimes:
    """Steps launched call by call; `event_milliseconds` is the time of two events without a call.

    Each call's time includes it.
    """

    steps: tuple[StepTimes, ...]
    event_milliseconds: float


@attrs.frozen
class WholeSteps:
    """Times of steps as in training, a graph if `is_graph`, and of steps launched call by call."""

    milliseconds: float
    launched_milliseconds: float
    is_graph: bool


# Between two waits for the GPU, so that a wait counts little.
_STEPS_AT_ONCE = 10


def time_whole_steps(
    program: Program, batch: Sequence[torch.Tensor], *, warmup: int, repeat: int
) -> WholeSteps:
    """Return medians of `repeat` means of some steps, from the host's call to the GPU's end."""
    # The second run records the graph.
    options: dict[str, Any] = {"warmup": max(warmup, 2), "number": _STEPS_AT_ONCE, "repeat": repeat}
    in_graph = statistics.median(time_program(program, batch, **options))
    is_graph = program.is_graph
    launched = statistics.median(time_program(program, batch, in_graph=False, **options))
    return WholeSteps(in_graph if is_graph else launched, launched, is_graph)


def time_launches(
    program: Program, batch: Sequence[torch.Tensor], *, warmup: int, steps: int
) -> LaunchTimes:
    """Run `warmup` steps launch by launch, then time every call of `steps` steps.

    An event is recorded before and after each call of the virtual machine, on the stream that the
    step runs on. They are read when the step is done: a step waits for the GPU once, at its end.
    `program` keeps the clock afterwards: use one made for this.

    Raises:
        OptionError: a number of steps is out of range.
        BuildError: another program ran on this thread meanwhile.
    """
    check_counts(("warmup", warmup, 0), ("steps", steps, 1))
    clock = _EventClock([call.symbol for call in program.plan.calls])
    program.executable.vm.set_instrument(clock.record)
    # A batch in the host's memory would be copied within the step, which waits for such a copy.
    batch = [one.to(program.device) for one in batch]
    found, nothing, seconds = [], [], _MOST_LEAD_SECONDS
    program.synchronise()
    for index in range(warmup + steps):
        with torch.cuda.device(program.device):
            torch.cuda._sleep(int(min(seconds * _LEAD, _MOST_LEAD_SECONDS) * _CYCLES_A_SECOND))
            started = time.perf_counter()
            clock.begin()
            program.run(batch, in_graph=False)
            clock.finish()
        seconds = min(seconds, time.perf_counter() - started)
        program.synchronise()
        if index >= warmup:
            found.append(clock.step_times())
            nothing.append(clock.nothing_milliseconds())
    return LaunchTimes(tuple(found), statistics.median(nothing))


class _EventClock:
    """The events of one step at a time."""

    def __init__(self, symbols: list[str]) -> None:
        self._symbols = symbols
        self._wanted = frozenset(symbols)
        self._seen: list[str] = []
        self._start, self._end, self._after_nothing = _event(), _event(), _event()
        self._pairs = [(_event(), _event()) for _ in symbols]

    def begin(self) -> None:
        """Discard the previous step and begin the next one."""
        self._seen.clear()
        self._start.record()

    def finish(self) -> None:
        """End the step."""
        self._end.record()
        self._after_nothing.record()

    def record(
        self, _function: Any, symbol: str, is_before: bool, _result: Any, *_arguments: Any
    ) -> None:
        """Record events around a call (the virtual machine's instrument); views launch nothing."""
        symbol = str(symbol)
        if symbol not in self._wanted:
            return
        if is_before:
            self._seen.append(symbol)
            if len(self._seen) > len(self._pairs):
                self._pairs.append((_event(), _event()))
        self._pairs[len(self._seen) - 1][0 if is_before else 1].record()

    def step_times(self) -> StepTimes:
        """Return the step's times; the GPU must be done with it."""
        check_seen(self._seen, self._symbols)
        return StepTimes(
            milliseconds=self._start.elapsed_time(self._end),
            begin_milliseconds=tuple(self._start.elapsed_time(one) for one, _ in self._pairs),
            end_milliseconds=tuple(self._start.elapsed_time(one) for _, one in self._pairs),
        )

    def nothing_milliseconds(self) -> float:
        """Return the time between two events with nothing between them."""
        return self._end.elapsed_time(self._after_nothing)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
