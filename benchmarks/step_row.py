# SPDX-License-Identifier: Apache-2.0
"""One row of `python -m benchmarks`: a workload in one dtype, ours beside PyTorch, in turns."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs

import amp_ir
from amp_ir.demo.workloads import Training, Workload
from amp_ir.ir.step_module import StepModule
from amp_ir.runtime.call_times import time_calls
from benchmarks.compiled_error import CompiledError, compiled_error
from benchmarks.peak import FIRST_STEPS, MEBIBYTE, OURS, PeakError, captured, measured_peak
from benchmarks.peers import COMPILED, Peer, Step, cold_compiler, layouts_of, make_peer, peer_name
from benchmarks.speed_of_light import peak_trials, peaks_of, speed_of_light_milliseconds
from benchmarks.workloads.further import ALL

# Groups of optional measurements, as each costs time. Times of our step and eager's are always
# measured.
COLUMNS = {
    "compile": "torch.compile as a peer, and how long it takes from a cold cache",
    "whole": "torch.compile with the backward pass in the graph of the forward pass, as a peer too",
    "autotune": 'torch.compile with mode="max-autotune" as a peer too; takes minutes to compile',
    "layouts": "torch.compile in both memory layouts, not only in the one that is eager's best",
    "peak": "measured peaks of memory, of each variant in a process of its own",
    "roofline": "the speed-of-light time as a share, at peak rates met between the steps; "
    "and the time outside of kernels",
    "error": "errors of the gradients against float64, in small shapes",
}
_TURN_MILLISECONDS = 20.0
Tell = Callable[[str], None]


@attrs.frozen
class Row:
    """The measurements of one workload in one dtype; None where one was not requested.

    The keys of the mappings are "ours" and the names of PyTorch's variants, such as "eager
    channels_last". `milliseconds` are medians of a step. `compile_seconds` are from no program to
    steps at full speed: the first steps, less the time of as many steps.
    `speed_of_light_milliseconds` is the step's arithmetic at the rate of a large matmul, or its
    bytes at that of a large copy, whichever is more; `peaks` are these rates, medians of trials
    that took turns with the steps: on a shared machine, the best rate ever measured says little
    about this minute. `outside_milliseconds` is the time of a call of the compiled step outside of
    its kernels and library calls. `failed` says which of PyTorch's variants did not run, and which
    peaks were not measured or are not to be believed ("peak of ours"), and why.
    """

    workload: str
    dtype: str
    milliseconds: dict[str, float]
    compile_seconds: dict[str, float]
    planned_mib: float
    measured_mib: dict[str, float]
    calls: int
    casts: int
    kernels: int
    losses: dict[str, float]
    speed_of_light_milliseconds: float | None = None
    outside_milliseconds: float | None = None
    clocked_milliseconds: float | None = None
    error: CompiledError | None = None
    failed: dict[str, str] = attrs.field(factory=dict)
    peaks: str = ""

    @property
    def ours(self) -> float:
        """Return milliseconds of our step."""
        return self.milliseconds["ours"]

    def best(self, variant: str = "") -> tuple[str, float] | None:
        """Return the fastest PyTorch variant whose name begins so, and its milliseconds."""
        names = [name for name in self.milliseconds if name != "ours" and name.startswith(variant)]
        name = min(names, key=self.milliseconds.__getitem__, default=None)
        return None if name is None else (name, self.milliseconds[name])

    def ratio(self, variant: str = "") -> float | None:
        """Return our time over the best variant's that begins with `variant`; below 1 is faster."""
        best = self.best(variant)
        return None if best is None else self.ours / best[1]

    @property
    def speed_of_light_share(self) -> float | None:
        """Return the speed-of-light time over our time: 1 is as fast as the machine can be."""
        return (
            None
            if self.speed_of_light_milliseconds is None
            else self.speed_of_light_milliseconds / self.ours
        )

    @property
    def outside_share(self) -> float | None:
        """Return the share of a step outside of kernels, both by the same clock."""
        if self.outside_milliseconds is None or self.clocked_milliseconds is None:
            return None
        return self.outside_milliseconds / self.clocked_milliseconds


@attrs.frozen
class Asked:
    """What to measure: groups of columns, steps of each variant, draws for the error."""

    columns: frozenset[str]
    rounds: int = 7
    draws: int = 5
    small: bool = False


def measure(name: str, dtype: str, asked: Asked, tell: Tell) -> Row:
    """Measure one workload in one dtype; call `tell` with the current stage."""
    with contextlib.ExitStack() as stack:
        if COMPILED.keys() & asked.columns:
            # Around everything: later compilations must not use an older cache either.
            stack.enter_context(cold_compiler())
        return _Measurement(ALL[name], dtype, asked, tell).run()


class _Measurement:
    def __init__(self, workload: Workload, dtype: str, asked: Asked, tell: Tell) -> None:
        self.workload = workload
        self.dtype = dtype
        self.asked = asked
        self.tell = tell
        self.steps: dict[str, Step] = {}
        # Seconds before the first step, and those of the first steps.
        self.built_seconds: dict[str, float] = {}
        self.first_seconds: dict[str, float] = {}
        self.measured: dict[str, int] = {}
        self.losses: dict[str, float] = {}
        self.failed: dict[str, str] = {}

    def run(self) -> Row:
        training = self.workload.make(small=self.asked.small)
        train, mod = self._start_ours(training)
        self._start_peers()
        self.tell(f"{self.asked.rounds} steps of each, in turns")
        trials = peak_trials() if "roofline" in self.asked.columns else {}
        medians = in_turns({**self.steps, **trials}, self.asked.rounds)
        row = self._row(train, {name: medians[name] for name in self.steps})
        if trials:
            peaks = peaks_of({name: medians[name] for name in trials})
            speed_of_light = speed_of_light_milliseconds(mod, peaks)
            row = attrs.evolve(row, speed_of_light_milliseconds=speed_of_light, peaks=str(peaks))
        return self._with_extras(row, train, mod, training)

    def _row(self, train: amp_ir.CompiledStep, medians: dict[str, float]) -> Row:
        plan = train.report.plan
        return Row(
            workload=self.workload.name,
            dtype=self.dtype,
            milliseconds=medians,
            compile_seconds={
                name: seconds
                + max(0.0, self.first_seconds[name] - FIRST_STEPS * medians[name] / 1e3)
                for name, seconds in self.built_seconds.items()
                if name in medians and not name.startswith("eager")
            },
            planned_mib=plan.peak_bytes / MEBIBYTE,
            measured_mib={name: size / MEBIBYTE for name, size in self.measured.items()},
            calls=len(plan.calls),
            casts=sum(call.is_cast for call in plan.calls),
            kernels=train.report.kernel_count,
            losses=self.losses,
            failed=self.failed,
        )

    def _start_peers(self) -> None:
        for layout in layouts_of(self.workload.name):
            self._start(self._peer("eager", layout))
        variants = [name for group, name in COMPILED.items() if group in self.asked.columns]
        if not variants:
            return
        for layout in self._layouts_to_compile():
            for variant in variants:
                self._start_compiled(self._peer(variant, layout))

    def _start_compiled(self, peer: Peer) -> None:
        try:
            self._start(peer)
        except RuntimeError as error:
            # Whatever torch.compile raises is recorded; the other rows still run.
            self.failed[peer.name] = str(error).strip().partition("\n")[0]
            del self.steps[peer.name]

    def _peer(self, variant: str, layout: str) -> Peer:
        return make_peer(self.workload, self.dtype, variant, layout, small=self.asked.small)

    def _layouts_to_compile(self) -> tuple[str, ...]:
        layouts = layouts_of(self.workload.name)
        if len(layouts) == 1 or "layouts" in self.asked.columns:
            return layouts
        variants = {layout: self.steps[peer_name("eager", layout)] for layout in layouts}
        spent = in_turns(variants, FIRST_STEPS)
        return (min(layouts, key=spent.__getitem__),)

    def _start_ours(self, training: Training) -> tuple[amp_ir.CompiledStep, StepModule]:
        self.tell("compiling ours")
        started = time.perf_counter()
        mod = captured(training, self.dtype)
        train = amp_ir.compile(mod)
        seconds = time.perf_counter() - started
        train.module.hooks.install_state()
        self._keep(OURS, lambda: train(*training.batch))
        self._take_first_steps(OURS, seconds)
        self._measure_peak(OURS)
        return train, mod

    def _start(self, peer: Peer) -> None:
        """Run PyTorch's step for the first times; torch.compile compiles here."""
        self.tell(f"first steps of {peer.name}")
        self._keep(peer.name, peer.step)
        self._take_first_steps(peer.name, 0.0)
        self._measure_peak(peer.name, peer.variant, peer.layout)

    def _measure_peak(self, name: str, variant: str = OURS, layout: str = "contiguous") -> None:
        if "peak" not in self.asked.columns:
            return
        self.tell(f"peak of {name}, in a process of its own")
        try:
            # torch.compile finds what it compiled here in its cache of files.
            self.measured[name] = measured_peak(
                self.workload.name, self.dtype, variant, layout, small=self.asked.small
            )
        except PeakError as error:
            self.failed[f"peak of {name}"] = str(error)

    def _keep(self, name: str, step: Step) -> None:
        """Keep the step, which records its first loss: all variants must start with the same."""

        def run() -> None:
            self.losses.setdefault(name, float(step()))

        self.steps[name] = run

    def _take_first_steps(self, name: str, seconds: float) -> None:
        started = time.perf_counter()
        for _ in range(FIRST_STEPS):
            self.steps[name]()
        self.built_seconds[name] = seconds
        self.first_seconds[name] = time.perf_counter() - started

    def _with_extras(
        self, row: Row, train: amp_ir.CompiledStep, mod: StepModule, training: Training
    ) -> Row:
        if "roofline" in self.asked.columns:
            self.tell("clocking calls")
            outside, clocked = outside_of_kernels(train, training.batch, self.asked.rounds)
            row = attrs.evolve(
                row,
                outside_milliseconds=outside,
                clocked_milliseconds=clocked,
            )
        if "error" in self.asked.columns:
            self.tell(f"errors of the gradients, {self.asked.draws} draws")
            found = compiled_error(row.workload, row.dtype, draws=self.asked.draws)
            row = attrs.evolve(row, error=found)
        return row


def in_turns(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Return median milliseconds of each; one warm-up round, then `rounds`, step after step.

    A turn has as many steps as fill `_TURN_MILLISECONDS`: a short one alone would be measured with
    the caches and the sleeping threads that the variant before it left, which training has not.
    """
    for step in steps.values():
        step()
    repeats = {
        name: math.ceil(_TURN_MILLISECONDS / _milliseconds(step)) for name, step in steps.items()
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(_milliseconds(step, repeats[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def _milliseconds(step: Step, repeats: int = 1) -> float:
    """Return the mean time of so many steps, at least a nanosecond."""
    started = time.perf_counter_ns()
    for _ in range(repeats):
        step()
    return max(1, time.perf_counter_ns() - started) / repeats / 1e6


def outside_of_kernels(
    train: amp_ir.CompiledStep, batch: Sequence[Any], steps: int
) -> tuple[float, float]:
    """Return median milliseconds of a step outside of calls, and of the step under the clock.

    From the call of the compiled step to its return: checks of batch, model and optimizer, views
    of their tensors, the virtual machine. The clock stays in `train`, so time it in no other manner
    afterwards.
    """
    times = time_calls(train.program, (), warmup=1, steps=steps, step=lambda: train(*batch))
    outside = statistics.median(one.outside_milliseconds for one in times)
    return outside, statistics.median(one.milliseconds for one in times)
