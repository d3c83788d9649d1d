# SPDX-License-Identifier: Apache-2.0
"""`amp_ir.profile_kernels`: the milliseconds of a step by kernel."""

from __future__ import annotations

import io
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape

from amp_ir.deprecation import Renamed
from amp_ir.dialect.collectives import START_SYMBOL
from amp_ir.files.atomic_file import write_text
from amp_ir.files.strict_json import strict_json
from amp_ir.host.peak_rates import MachinePeaks
from amp_ir.ir.dispatch_log import DispatchNote
from amp_ir.ir.memory_plan import PlannedCall, PlannedStep
from amp_ir.report.exchange_profile import (
    ExchangeProfile,
    Traffic,
    exchange_lines,
    exchange_profiles,
)
from amp_ir.report.kernel_table import headline, kernel_table
from amp_ir.report.trace import trace_events
from amp_ir.report.wide_console import FILE_COLUMNS


class StepTimes(Protocol):
    """The times of one step; see amp_ir.runtime.call_times.StepTimes."""

    @property
    def milliseconds(self) -> float:
        """The whole step."""

    @property
    def begin_milliseconds(self) -> Sequence[float]:
        """When each call began."""

    @property
    def end_milliseconds(self) -> Sequence[float]:
        """When each call ended."""


@attrs.frozen
class CallProfile:
    """One call of the step.

    `milliseconds` is the median over the timed steps, which on a CPU is scaled so that all calls
    take together what the median step spends in calls.
    `lines` are the source lines that it comes from, "model.py:12". `nbytes` is what it reads and
    writes, each tensor once; `speed_of_light_milliseconds` is the time at the machine's peak rates.
    `begin_milliseconds` and `shown_milliseconds` are of the one step that a trace shows.
    """

    name: str
    ops: tuple[str, ...]
    modules: tuple[str, ...]
    phase: str
    dtype: str
    milliseconds: float
    begin_milliseconds: float
    shown_milliseconds: float
    nbytes: int
    flop: int
    speed_of_light_milliseconds: float
    is_cast: bool
    lines: tuple[str, ...] = ()

    floor_milliseconds = Renamed("speed_of_light_milliseconds")


@attrs.frozen
class KernelTotal:
    """All calls of one kernel, on tensors of the same size, in one phase of the step."""

    name: str
    ops: tuple[str, ...]
    modules: tuple[str, ...]
    phase: str
    dtype: str
    calls: int
    milliseconds: float
    nbytes: int
    flop: int
    speed_of_light_milliseconds: float
    is_cast: bool
    lines: tuple[str, ...] = ()

    floor_milliseconds = Renamed("speed_of_light_milliseconds")

    @property
    def gflop_per_second(self) -> float:
        """Return 10^9 operations a second; 0 for a kernel that took no measurable time."""
        return self.flop / self.milliseconds / 1e6 if self.milliseconds else 0.0

    @property
    def roofline_share(self) -> float:
        """Return speed-of-light over measured time; above 1 when data was still in a cache."""
        return self.speed_of_light_milliseconds / self.milliseconds if self.milliseconds else 0.0


@attrs.frozen
class GpuSteps:
    """Whole steps on a GPU.

    `milliseconds` is a step as it runs in training, `is_graph` whether that is one CUDA graph, and
    `launched_milliseconds` the step launched call by call: the difference is what gaps between
    launches cost. Each kernel's time includes the `event_milliseconds` of the events around it.
    """

    milliseconds: float
    launched_milliseconds: float
    event_milliseconds: float
    is_graph: bool


@attrs.frozen
class KernelProfile:
    """The time of a step by kernel, and the library that each heavy op went to.

    `step_milliseconds` is the median of `steps` whole steps; on a GPU, which has `gpu`, of steps
    as they run in training, while kernels are timed launch by launch. `exchanges` are the buckets
    that ranks exchange; the time of an `all_reduce_wait` among the calls is what is exposed of one.
    """

    step_milliseconds: float
    steps: int
    calls: tuple[CallProfile, ...] = attrs.field(repr=False)
    held_nbytes: tuple[int, ...] = attrs.field(repr=False)
    peaks: MachinePeaks
    dispatched: tuple[DispatchNote, ...] = attrs.field(default=(), repr=False)
    gpu: GpuSteps | None = None
    exchanges: tuple[ExchangeProfile, ...] = ()

    @property
    def kernels(self) -> tuple[KernelTotal, ...]:
        """Return the calls, equal ones together, the longest first."""
        groups: dict[Any, list[CallProfile]] = {}
        for call in self.calls:
            key = (call.name, call.ops, call.phase, call.dtype, call.nbytes, call.flop)
            groups.setdefault(key, []).append(call)
        totals = (_total(group) for group in groups.values())
        return tuple(sorted(totals, key=lambda total: -total.milliseconds))

    @property
    def kernel_milliseconds(self) -> float:
        """Return the time inside of kernels and library calls."""
        return sum(call.milliseconds for call in self.calls)

    @property
    def overhead_share(self) -> float:
        """Return the share of the step outside of all kernels."""
        return max(0.0, 1 - self.kernel_milliseconds / self.step_milliseconds)

    @property
    def cast_share(self) -> float:
        """Return the share of the step spent in kernels that do nothing but cast."""
        return sum(call.milliseconds for call in self.calls if call.is_cast) / (
            self.step_milliseconds
        )

    @property
    def speed_of_light_share(self) -> float:
        """Return the step's speed-of-light time over its measured time."""
        least = sum(call.speed_of_light_milliseconds for call in self.calls)
        return least / self.step_milliseconds

    floor_share = Renamed("speed_of_light_share")

    @property
    def milliseconds_by_phase(self) -> Mapping[str, float]:
        """Return the time of kernels in the forward pass, the backward pass and the optimizer.

        "other" is work that no line of yours asked for, such as the copy of a state.
        """
        sums: dict[str, float] = {}
        for call in self.calls:
            phase = call.phase or "other"
            sums[phase] = sums.get(phase, 0.0) + call.milliseconds
        return sums

    def to_json(self) -> str:
        """Return everything as a JSON document."""
        document = attrs.asdict(self)
        document["kernels"] = [
            attrs.asdict(one)
            | {"gflop_per_second": one.gflop_per_second, "roofline_share": one.roofline_share}
            for one in self.kernels
        ]
        # The names of 0.1, which go in the next minor version.
        for one in (*document["calls"], *document["kernels"]):
            one["floor_milliseconds"] = one["speed_of_light_milliseconds"]
        document["floor_share"] = self.speed_of_light_share
        for name in ("kernel_milliseconds", "overhead_share", "cast_share", "speed_of_light_share"):
            document[name] = getattr(self, name)
        return strict_json(document)

    def save_trace(self, path: str | Path) -> None:
        """Write one step as a JSON trace for chrome://tracing or ui.perfetto.dev.

        It has tracks for forward, backward, optimizer and, for several ranks, the exchange, and a
        counter of the arena's bytes in use.
        """
        events = trace_events(self.calls, self.held_nbytes, self.exchanges)
        write_text(path, json.dumps(events))

    def headline(self) -> str:
        """Return the step in a few lines."""
        return headline(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield a few lines, a table, and the libraries of heavy ops, for a terminal."""
        yield escape(self.headline())
        yield ""
        yield kernel_table(self, options.max_width)
        if self.exchanges:
            yield ""
            yield from map(escape, exchange_lines(self.exchanges, self.step_milliseconds))
        if self.dispatched:
            yield ""
            yield from (escape(str(note)) for note in self.dispatched)

    def __str__(self) -> str:
        """Return the same as plain text, as wide as a file's."""
        console = Console(file=io.StringIO(), width=FILE_COLUMNS, record=True)
        console.print(self)
        return console.export_text().rstrip()


def profile_of(
    planned: PlannedStep,
    flop: Sequence[int],
    steps: Sequence[StepTimes],
    peaks: MachinePeaks,
    gpu: GpuSteps | None = None,
    traffic: Sequence[Sequence[Traffic]] = (),
) -> KernelProfile:
    """Join the plan with the measurements.

    Args:
        planned: its plan's calls are those that were timed.
        flop: of each call.
        steps: the timed steps; the one of median length is shown in traces.
        peaks: the machine's.
        gpu: whole steps on a GPU, where `steps` are launched call by call.
        traffic: the exchanges of each timed step.
    """
    plan = planned.plan
    shown = sorted(steps, key=lambda step: step.milliseconds)[len(steps) // 2]
    medians = _medians(steps)
    if gpu is None:
        medians = _adding_up(medians, steps)
    calls = []
    for k, call in enumerate(plan.calls):
        begin = shown.begin_milliseconds[k]
        in_trace = (begin, shown.end_milliseconds[k] - begin)
        nbytes = call.read_nbytes + call.written_nbytes
        least = peaks.speed_of_light_milliseconds(flop[k], nbytes, call.compute_dtype)
        calls.append(_call(call, medians[k], in_trace, flop[k], least))
    median = statistics.median(step.milliseconds for step in steps)
    begins = [
        shown.begin_milliseconds[k]
        for k, one in enumerate(plan.calls)
        if one.symbol == START_SYMBOL
    ]
    return KernelProfile(
        median if gpu is None else gpu.milliseconds,
        len(steps),
        tuple(calls),
        plan.live_bytes,
        peaks,
        planned.dispatched,
        gpu,
        exchange_profiles(traffic, begins if traffic else ()),
    )


def _spent(step: StepTimes) -> list[float]:
    """Return the milliseconds of each call."""
    both = zip(step.begin_milliseconds, step.end_milliseconds, strict=True)
    return [end - begin for begin, end in both]


def _medians(steps: Sequence[StepTimes]) -> list[float]:
    """Return the median milliseconds of each call."""
    return [statistics.median(times) for times in zip(*map(_spent, steps), strict=True)]


def _adding_up(medians: Sequence[float], steps: Sequence[StepTimes]) -> list[float]:
    """Return the medians, scaled to the time that the median step spends in calls.

    Where the machine's speed changes from step to step, the medians of the calls are of faster
    moments than the step's: they add up to less, and the rest is not time outside of kernels.
    """
    share = statistics.median(sum(_spent(one)) / one.milliseconds for one in steps)
    inside = share * statistics.median(one.milliseconds for one in steps)
    total = sum(medians)
    return [one * inside / total for one in medians] if total else list(medians)


def _call(
    call: PlannedCall,
    milliseconds: float,
    in_trace: tuple[float, float],
    flop: int,
    speed_of_light_milliseconds: float,
) -> CallProfile:
    return CallProfile(
        name=call.name,
        ops=call.ops,
        modules=tuple(dict.fromkeys(place.module for place in call.locations if place.module)),
        phase=call.locations[0].phase if call.locations else "",
        dtype=call.compute_dtype,
        milliseconds=milliseconds,
        begin_milliseconds=in_trace[0],
        shown_milliseconds=in_trace[1],
        nbytes=call.read_nbytes + call.written_nbytes,
        flop=flop,
        speed_of_light_milliseconds=speed_of_light_milliseconds,
        is_cast=call.is_cast,
        lines=tuple(
            dict.fromkeys(
                f"{os.path.basename(place.file)}:{place.line}"
                for place in call.locations
                if place.file
            )
        ),
    )


def _total(group: list[CallProfile]) -> KernelTotal:
    first = group[0]
    modules = dict.fromkeys(module for call in group for module in call.modules)
    lines = dict.fromkeys(line for call in group for line in call.lines)
    return KernelTotal(
        name=first.name,
        ops=first.ops,
        modules=tuple(modules),
        phase=first.phase,
        dtype=first.dtype,
        calls=len(group),
        milliseconds=sum(call.milliseconds for call in group),
        nbytes=sum(call.nbytes for call in group),
        flop=sum(call.flop for call in group),
        speed_of_light_milliseconds=sum(call.speed_of_light_milliseconds for call in group),
        is_cast=first.is_cast,
        lines=tuple(lines),
    )
