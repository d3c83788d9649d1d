# SPDX-License-Identifier: Apache-2.0
"""Training steps on a GPU beside PyTorch, in milliseconds: `python -m benchmarks --device cuda`.

For each workload our step in float32 (without and with TF32), bfloat16, and float16 with the loss
scaler, and PyTorch's eager and compiled steps in the same precisions: torch.autocast, a GradScaler
for float16, fused optimizers, torch.compile in its default mode and in "reduce-overhead", and the
eager step recorded as a CUDA graph by hand, as PyTorch's notes show it. All variants of one
precision run in turns. A time is the median over rounds of the mean step of a round, between two
synchronisations. Peaks are the maximum of allocated bytes while the variant was set up and run
alone. `waits` are the calls of a step that make the host wait for the GPU, counted by PyTorch's
profiler. `roofline` is the speed-of-light time at the GPU's measured peak rates, as a share of our
time.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

import amp_ir
from amp_ir.api import lower
from amp_ir.demo.workloads import Training, Workload
from amp_ir.files.atomic_file import write_text
from amp_ir.host.peak_rates import measure_peaks
from amp_ir.ir.target import target_of
from benchmarks.host_waits import host_waits
from benchmarks.loss_scale import eager, scaled_step
from benchmarks.peers import in_layout, layouts_of, peer_name
from benchmarks.speed_of_light import planned_speed_of_light
from benchmarks.workloads.gpu_sized import ON_GPU

Step = Callable[[], Any]
Tell = Callable[[str], None]
# A precision: the dtype, and whether float32 matmuls may be rounded to TF32.
PRECISIONS = {
    "float32": ("float32", False),
    "tf32": ("float32", True),
    "bfloat16": ("bfloat16", False),
    "float16": ("float16", False),
}
OURS = "ours"
MODES = {"compile": "default", "graphs": "reduce-overhead"}
# The eager step as a CUDA graph. A GradScaler reads the host, so there is none in float16.
BY_HAND = "graph by hand"
# Our float16 step without the loss scaler.
UNSCALED = "unscaled"
# Enough for eager's state, for torch.compile's kernels and for both their graphs.
_WARMUP = 5
_STEPS_A_ROUND = 10
_PROFILED_STEPS = 5


def _nothing() -> None:
    pass


@attrs.frozen
class GpuRow:
    """One workload in one precision; the keys of the mappings are "ours" and PyTorch's variants.

    `unscaled_milliseconds` is our float16 step without the scaler; `failed` says why a variant is
    missing. `kernels` are the GPU's activities in our step and in PyTorch's fastest: name, launches
    and microseconds a step.
    """

    workload: str
    precision: str
    milliseconds: dict[str, float]
    peak_mib: dict[str, float]
    compile_seconds: float
    planned_mib: float
    waits: int | None
    speed_of_light_milliseconds: float
    unscaled_milliseconds: float | None = None
    failed: dict[str, str] = attrs.field(factory=dict)
    kernels: dict[str, list[tuple[str, float, float]]] = attrs.field(factory=dict, repr=False)

    @property
    def best(self) -> tuple[str, float]:
        """Return the fastest of PyTorch's variants, and its milliseconds."""
        peers = {name: value for name, value in self.milliseconds.items() if name != OURS}
        name = min(peers, key=peers.__getitem__)
        return name, peers[name]

    @property
    def ratio(self) -> float:
        """Return our time over PyTorch's best; below 1 is faster."""
        return self.milliseconds[OURS] / self.best[1]

    @property
    def speed_of_light_share(self) -> float:
        """Return our step's time at the device's peak rates over its measured time."""
        return self.speed_of_light_milliseconds / self.milliseconds[OURS]

    @property
    def scaler_cost(self) -> float | None:
        """Return the time of the step with the loss scaler over that without it."""
        if self.unscaled_milliseconds is None:
            return None
        return self.milliseconds[OURS] / self.unscaled_milliseconds


def measure(
    name: str,
    precision: str,
    *,
    rounds: int,
    small: bool,
    tell: Tell,
    device: str = "cuda",
    take_turn: Callable[[], None] = _nothing,
) -> GpuRow:
    """Measure all variants of one workload in one precision, in turns.

    `take_turn` is called when all of them are set up; from its return on nothing else may use the
    GPU.
    """
    dtype, allow_tf32 = PRECISIONS[precision]
    torch._dynamo.reset()
    steps: dict[str, Step] = {}
    peaks: dict[str, float] = {}
    failed: dict[str, str] = {}
    with _tf32(allow_tf32):
        tell(OURS)
        with _peak(device, peaks, OURS):
            started = time.perf_counter()
            compiled, steps[OURS] = _our_step(ON_GPU[name], dtype, small, device, scaled=True)
            seconds = time.perf_counter() - started
            _run(steps[OURS], _WARMUP, device)
        for variant, make_step in _peers(ON_GPU[name], dtype, small, device):
            tell(variant)
            try:
                # With the model's parameters, as in ours.
                with _peak(device, peaks, variant):
                    step = make_step()
                    _run(step, _WARMUP, device)
            except RuntimeError as error:
                # Whatever torch.compile raises is recorded; the other variants still run.
                if variant.startswith("eager"):
                    raise
                failed[variant] = str(error).strip().partition("\n")[0]
                continue
            steps[variant] = step
        if dtype == "float16":
            _, steps[UNSCALED] = _our_step(ON_GPU[name], dtype, small, device, scaled=False)
            _run(steps[UNSCALED], _WARMUP, device)
        planned = lower(compiled.module, target=target_of(device))
        take_turn()
        tell("in turns")
        milliseconds = _in_turns(steps, rounds, device)
        waits = host_waits(steps[OURS]) if device == "cuda" else None
        speed_of_light = planned_speed_of_light(planned, measure_peaks(device))
        kernels = _kernels(steps, milliseconds) if device == "cuda" else {}
    unscaled = milliseconds.pop(UNSCALED, None)
    return GpuRow(
        workload=name,
        precision=precision,
        milliseconds=milliseconds,
        peak_mib=peaks,
        compile_seconds=seconds,
        planned_mib=compiled.report.plan.peak_bytes / 2**20,
        waits=waits,
        speed_of_light_milliseconds=speed_of_light,
        unscaled_milliseconds=unscaled,
        failed=failed,
        kernels=kernels,
    )


def _kernels(
    steps: dict[str, Step], milliseconds: dict[str, float]
) -> dict[str, list[tuple[str, float, float]]]:
    """Return the GPU's activities in our step and in PyTorch's fastest, most time first."""
    peers = {name: took for name, took in milliseconds.items() if name in steps and name != OURS}
    peers.pop(UNSCALED, None)
    best = min(peers, key=peers.__getitem__)
    return {name: _activities(steps[name]) for name in (OURS, best)}


def _activities(step: Step) -> list[tuple[str, float, float]]:
    """Return names, launches a step and microseconds a step, as PyTorch's profiler sees them."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        _run(step, _PROFILED_STEPS, "cuda")
    rows = [
        (one.key, one.count / _PROFILED_STEPS, one.self_device_time_total / _PROFILED_STEPS)
        for one in found.key_averages()
        if one.self_device_time_total
    ]
    return sorted(rows, key=lambda row: -row[2])


def _our_step(
    workload: Workload, dtype: str, small: bool, device: str, *, scaled: bool
) -> tuple[amp_ir.CompiledStep, Step]:
    training = workload.make(small=small, device=device)
    scaler = amp_ir.GradScaler(device) if dtype == "float16" and scaled else None
    step = training.step if scaler is None else scaled_step(training, scaler)
    mod, args = amp_ir.trace_step(
        step, training.batch, model=training.model, optimizer=training.optimizer, scaler=scaler
    )
    if dtype != "float32":
        mod = amp_ir.autocast(mod, args, amp_dtype=dtype)
    compiled = amp_ir.compile(mod, device=device)
    return compiled, lambda: compiled(*training.batch)


def _peers(
    workload: Workload, dtype: str, small: bool, device: str
) -> Iterator[tuple[str, Callable[[], Step]]]:
    """Yield PyTorch's variants: names, and functions that make a model and its step."""

    def made(layout: str, *, capturable: bool = False) -> Step:
        training = in_layout(workload.make(small=small, device=device), layout)
        return _peer_step(_with_fused_optimizer(training, capturable=capturable), dtype, device)

    def compiled(layout: str, mode: str) -> Step:
        return torch.compile(made(layout), mode=mode)

    def recorded(layout: str) -> Step:
        return RecordedByHand(made(layout, capturable=True))

    for layout in layouts_of(workload.name):
        yield peer_name("eager", layout), functools.partial(made, layout)
        if device != "cuda":
            continue
        for variant, mode in MODES.items():
            yield peer_name(variant, layout), functools.partial(compiled, layout, mode)
        if dtype != "float16":
            yield peer_name(BY_HAND, layout), functools.partial(recorded, layout)


class RecordedByHand:
    """A step that is recorded as a CUDA graph at its first call, and replayed from then on.

    Source: PyTorch's notes on CUDA, "CUDA Graphs", whole-network capture.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._graph: Any = None

    def __call__(self) -> None:
        """Run the step."""
        if self._graph is None:
            self._record()
        self._graph.replay()

    def _record(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self._graph = graph


def _peer_step(training: Training, dtype: str, device: str) -> Step:
    """Run PyTorch's step in its recommended form; a disabled scaler has no effect."""
    scaler = torch.amp.GradScaler(device, enabled=dtype == "float16")
    step = eager(training, scaler, dtype)
    return lambda: step(*training.batch)


def _with_fused_optimizer(training: Training, *, capturable: bool = False) -> Training:
    """Return the training with the optimizer's fused kernels, as PyTorch recommends on a GPU."""
    old = training.optimizer
    known = inspect.signature(type(old)).parameters
    options = {key: value for key, value in old.defaults.items() if key in known}
    options |= {"fused": True, "foreach": None}
    # SGD has no such option, and needs none.
    options |= {"capturable": True} if capturable and "capturable" in known else {}
    made = type(old)(training.model.parameters(), **options)
    return attrs.evolve(training, optimizer=made)


def _in_turns(steps: dict[str, Step], rounds: int, device: str) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            _run(step, _STEPS_A_ROUND, device)
            times[name].append((time.perf_counter() - started) / _STEPS_A_ROUND * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def _run(step: Step, count: int, device: str) -> None:
    """Run steps, from an idle device to an idle device."""
    _synchronise(device)
    for _ in range(count):
        step()
    _synchronise(device)


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def _peak(device: str, peaks: dict[str, float], variant: str) -> Iterator[None]:
    """Record the peak of MiB allocated inside of the block, above those allocated before."""
    if device != "cuda":
        yield
        return
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.synchronize()
    peaks[variant] = (torch.cuda.max_memory_allocated() - before) / 2**20


@contextlib.contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid rounding float32 matmuls, ours and PyTorch's, to TF32."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def table_of(rows: Sequence[GpuRow]) -> Table:
    """Return a table with one row per workload and precision."""
    table = Table(title="milliseconds a step; MiB at the peak", title_justify="left")
    table.add_column("workload")
    table.add_column("precision")
    for heading in ("ours", "best", "ratio", "AMP gain", "roofline", "ours MiB", "its MiB",
                    "plan MiB", "build s", "scaler", "waits"):  # fmt: skip
        table.add_column(heading, justify="right")
    table.add_column("best of PyTorch")
    full = {row.workload: row.milliseconds[OURS] for row in rows if row.precision == "float32"}
    for row in rows:
        variant, best = row.best
        gain = full[row.workload] / row.milliseconds[OURS] if row.workload in full else None
        table.add_row(
            row.workload, row.precision, f"{row.milliseconds[OURS]:.3f}", f"{best:.3f}",
            f"{row.ratio:.2f}", _number(gain, 2), f"{row.speed_of_light_share:.0%}",
            _number(row.peak_mib.get(OURS), 0), _number(row.peak_mib.get(variant), 0),
            f"{row.planned_mib:.0f}",
            f"{row.compile_seconds:.1f}", _number(row.scaler_cost, 3),
            "-" if row.waits is None else str(row.waits), variant,
        )  # fmt: skip
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def describe_gpu() -> dict[str, Any]:
    """Return the description of the GPU; the peak rates are those of PyTorch's default for TF32."""
    is_here = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if is_here else "none",
        "peaks": str(measure_peaks("cuda")) if is_here else "none",
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "amp_ir": amp_ir.__version__,
    }


def save(rows: Sequence[GpuRow], path: Path) -> None:
    """Write the rows and the GPU's description as JSON."""
    path.parent.mkdir(exist_ok=True)
    document = {"machine": describe_gpu(), "rows": [attrs.asdict(row) for row in rows]}
    write_text(path, json.dumps(document, indent=2) + "\n")
