# SPDX-License-Identifier: Apache-2.0
"""Begin and end times of each kernel and library call of a step."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from amp_ir.host import native
from amp_ir.runtime.profile import check_counts
from amp_ir.runtime.program import Program


@attrs.frozen
class StepTimes:
    """One step: its duration, and begin and end of each call, in milliseconds from its start."""

    milliseconds: float
    begin_milliseconds: tuple[float, ...]
    end_milliseconds: tuple[float, ...]

    @property
    def outside_milliseconds(self) -> float:
        """Return the time outside of kernels and library calls: Python and the virtual machine."""
        calls = zip(self.begin_milliseconds, self.end_milliseconds, strict=True)
        return self.milliseconds - sum(end - begin for begin, end in calls)


def time_calls(
    program: Program,
    batch: Sequence[torch.Tensor],
    *,
    warmup: int,
    steps: int,
    step: Callable[[], Any] | None = None,
) -> list[StepTimes]:
    """Run `warmup` steps, then time every call of `steps` steps, on a CPU.

    Native code reads the clock around each call of the virtual machine, which adds less than a
    microsecond to it. `program` keeps the clock afterwards: use one made for this. A step is
    `program.run(batch)` or, where it is given, `step()`, which runs the program and what belongs
    to it: with a CompiledStep's call its checks of batch and state count as well.

    Raises:
        OptionError: a number of steps is out of range.
        BuildError: this build has no clock.
    """
    check_counts(("warmup", warmup, 0), ("steps", steps, 1))
    symbols = [call.symbol for call in program.plan.calls]
    program.executable.vm.set_instrument(native.function("amp_ir.call_clock.record"))
    take = native.function("amp_ir.call_clock.take")
    step = step or functools.partial(program.run, batch)
    found = []
    for index in range(warmup + steps):
        take()
        started = time.perf_counter_ns()
        step()
        ended = time.perf_counter_ns()
        if index >= warmup:
            found.append(_step_times(symbols, take(), started, ended))
    return found


def _step_times(
    symbols: list[str], reading: tuple[Sequence[str], Sequence[int]], started: int, ended: int
) -> StepTimes:
    """Keep planned calls; views and the virtual machine's own calls come between them."""
    wanted = set(symbols)
    names, times = list(reading[0]), list(reading[1])
    at = [k for k, name in enumerate(names) if str(name) in wanted]
    check_seen([str(names[k]) for k in at], symbols)
    return StepTimes(
        milliseconds=(ended - started) / 1e6,
        begin_milliseconds=tuple((times[2 * k] - started) / 1e6 for k in at),
        end_milliseconds=tuple((times[2 * k + 1] - started) / 1e6 for k in at),
    )


def check_seen(seen: list[str], planned: list[str]) -> None:
    """Require that the calls that a clock timed are those of the plan."""
    # Its virtual machine is the only one that has this clock.
    assert seen == planned, f"the clock saw {len(seen)} calls where {len(planned)} were planned"
