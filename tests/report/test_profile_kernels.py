# SPDX-License-Identifier: Apache-2.0
"""The profile by kernel: counts of arithmetic and bytes, what adds up, table, JSON and trace."""

from __future__ import annotations

import copy
import io
import json
import re
from pathlib import Path

import attrs
import pytest
import torch
import tvm
from rich.console import Console
from torch import nn
from tvm import tirx

import amp_ir
from amp_ir.api import lower
from amp_ir.dispatch.accumulate_matmuls import ACCUMULATE
from amp_ir.errors import OptionError
from amp_ir.host import native
from amp_ir.host.peak_rates import MachinePeaks, cpu_peaks, cpu_trials, measure_peaks
from amp_ir.ir.dispatch_log import DispatchNote
from amp_ir.ir.memory_plan import MemoryPlan, PlannedCall, PlannedStep
from amp_ir.ir.target import cpu, cuda
from amp_ir.memory.call_cost import flop_of_calls, kernel_flop
from amp_ir.report.kernel_profile import GpuSteps, KernelProfile, profile_of
from amp_ir.runtime.call_times import StepTimes

ROWS, INNER, OUTER = 16, 24, 40

pytestmark = pytest.mark.skipif(
    not native.has("amp_ir.call_clock.take"), reason="this build has no clock (no OpenMP)"
)


class Net(nn.Module):
    """A convolution, a linear layer and a nonlinearity, each with a name."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Conv1d(2, 6, 3, groups=2, padding=1, bias=False)
        self.scores = nn.Linear(INNER, OUTER)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.scores(self.filter(x)))


def traced(amp_dtype: str | None = None, model: nn.Module | None = None):
    model = model or Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batch = (torch.randn(ROWS, 2, INNER),)
    mod, args = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
    return (mod if amp_dtype is None else amp_ir.autocast(mod, args, amp_dtype=amp_dtype)), args


@pytest.fixture(scope="module")
def profile() -> KernelProfile:
    mod, args = traced("bfloat16")
    before = copy.deepcopy({k: v for k, v in mod.state.items() if isinstance(v, torch.Tensor)})
    found = amp_ir.profile_kernels(mod, "cpu", args, steps=3, warmup=1)
    assert all(torch.equal(mod.state[name], value) for name, value in before.items())
    return found


def test_library_calls_count_two_for_each_product() -> None:
    planned = lower(traced()[0])
    counts = flop_of_calls(planned)
    found = [
        (call.name.rpartition(".")[2], flop)
        for call, flop in zip(planned.plan.calls, counts, strict=True)
        if not call.name.startswith(("kernel", "copy"))
    ]
    linear = 2 * ROWS * 6 * INNER * OUTER
    # Each of 6 channels sees 1 of the 2 of the input, through 3 taps.
    convolution = 2 * ROWS * 6 * INNER * 1 * 3
    assert sorted(found) == sorted(
        [
            ("conv", convolution),
            ("conv_backward_weight", convolution),
            *[("matmul", linear)] * 2,
            # The gradient of the weight, straight into the weight.
            ("matmul_accumulate" if native.has(ACCUMULATE) else "matmul", linear),
        ]
    )


def test_kernels_count_the_arithmetic_of_their_loops() -> None:
    source = tirx.decl_buffer((64,), "float32", "source")
    target = tirx.decl_buffer((64,), "float32", "target")
    row, lane = tirx.Var("row", "int32"), tirx.Var("lane", "int32")
    at = row * 16 + lane  # integers do not count
    element = tirx.BufferLoad(source, [at])
    value = tirx.exp(element) * element + tirx.const(1.0, "float32")
    store = tirx.BufferStore(target, value, [at])
    inner = tirx.For(lane, 0, 16, tirx.ForKind.VECTORIZED, store)
    function = tirx.PrimFunc([source, target], tirx.For(row, 0, 4, tirx.ForKind.SERIAL, inner))
    assert kernel_flop(function) == 64 * 3


def test_threads_count_as_the_loops_that_they_are() -> None:
    """Two kernels in one launch, the first with 3 of 4 blocks and 5 of 8 threads at work."""
    out = tirx.decl_buffer((64,), "float32", "out")
    block, thread = tirx.Var("block", "int32"), tirx.Var("thread", "int32")
    own = tirx.Var("own", "int32")
    element = tirx.BufferLoad(out, [thread])

    def store(value: tirx.PrimExpr) -> tirx.Stmt:
        return tirx.BufferStore(out, value, [thread])

    few = tirx.And(own < 5, tirx.const(0, "int32") <= own)  # the second says nothing of shares
    first = tirx.SeqStmt(
        [tirx.Bind(own, thread), tirx.IfThenElse(few, store(element + element), None)]
    )
    second = store(element * element * element)
    body: tirx.Stmt = tirx.IfThenElse(block < 3, first, second)
    for variable, tag, extent in ((thread, "threadIdx.x", 8), (block, "blockIdx.x", 4)):
        span = tvm.ir.Range(0, extent)
        place = tirx.IterVar(span, variable, tirx.IterVar.ThreadIndex, tag)
        body = tirx.AttrStmt(place, "thread_extent", tirx.IntImm("int32", extent), body)
    assert kernel_flop(tirx.PrimFunc([out], body)) == 3 * 5 + 8 * 2


def test_a_step_counts_as_much_arithmetic_on_a_gpu() -> None:
    """Without a tanh: the GPU has a function for it, which counts once, the CPU a polynomial."""
    mod, _ = traced(model=nn.Sequential(nn.Conv1d(2, 6, 3, padding=1), nn.Linear(INNER, OUTER)))
    counted = []
    for target in (cpu(), cuda("sm_90")):
        planned = lower(mod, target=target)
        flop = flop_of_calls(planned)
        calls = zip(flop, planned.plan.calls, strict=True)
        counted.append([count for count, call in calls if "." not in call.name])
    # What threads add to combine their sums, much beside sums over so few elements, and no more.
    assert sum(counted[0]) <= sum(counted[1]) <= 1.5 * sum(counted[0])


def test_a_sum_of_very_many_terms_is_counted() -> None:
    """The norm of all gradients of 12 layers is a chain deeper than Python."""
    out = tirx.decl_buffer((1,), "float32", "out")
    value = tirx.BufferLoad(out, [0])
    for _ in range(3000):
        value = value + tirx.BufferLoad(out, [0])
    assert kernel_flop(tirx.PrimFunc([out], tirx.BufferStore(out, value, [0]))) == 3000


def test_a_loop_that_ends_where_the_data_say_counts_once() -> None:
    ends = tirx.decl_buffer((4,), "int32", "ends")
    out = tirx.decl_buffer((64,), "float32", "out")
    row, end, at = (tirx.Var(name, "int32") for name in ("row", "end", "at"))
    element = tirx.BufferLoad(out, [at])
    store = tirx.BufferStore(out, element + element, [at])
    loop = tirx.For(at, 0, (end + 7) // 8, tirx.ForKind.SERIAL, store)
    body = tirx.SeqStmt([tirx.Bind(end, tirx.BufferLoad(ends, [row])), loop])
    rows = tirx.For(row, 0, 4, tirx.ForKind.SERIAL, body)
    assert kernel_flop(tirx.PrimFunc([ends, out], rows)) == 4


def test_bytes_are_those_of_the_tensors() -> None:
    calls = {call.ops[0]: call for call in lower(traced()[0]).plan.calls if call.ops[0] == "conv"}
    conv = calls["conv"]
    assert conv.read_nbytes == 4 * (ROWS * 2 * INNER + 6 * 1 * 3)
    assert conv.written_nbytes == 4 * ROWS * 6 * INNER
    assert [place.module for place in conv.locations] == ["filter"]
    assert not conv.is_cast


def test_a_real_profile_adds_up(profile: KernelProfile) -> None:
    assert profile.steps == 3 and profile.step_milliseconds > 0
    assert len(profile.calls) == len(profile.held_nbytes)
    spent = sum(one.milliseconds for one in profile.kernels)
    assert spent == pytest.approx(profile.kernel_milliseconds)
    assert spent == pytest.approx(sum(profile.milliseconds_by_phase.values()))
    assert sum(one.calls for one in profile.kernels) == len(profile.calls)
    assert {"forward", "backward", "optimizer"} <= set(profile.milliseconds_by_phase)
    slowest = [one.milliseconds for one in profile.kernels]
    assert slowest == sorted(slowest, reverse=True)
    # One after another, on the clock of one step.
    for one, following in zip(profile.calls, profile.calls[1:], strict=False):
        assert one.begin_milliseconds + one.shown_milliseconds <= following.begin_milliseconds


@pytest.mark.skipif(not native.has("amp_ir.onednn.matmul"), reason="oneDNN is the first choice")
def test_arithmetic_is_counted_in_kernels_that_know_their_extents(profile: KernelProfile) -> None:
    # Those that run get their numbers of rows as arguments.
    (mod, _) = traced("bfloat16")
    assert sum(one.flop for one in profile.calls) == sum(flop_of_calls(lower(mod)))


def test_the_library_of_each_heavy_op_is_told(profile: KernelProfile) -> None:
    assert {str(note) for note in profile.dispatched} == {
        "amp_ir.conv: 1 call -> onednn",
        "amp_ir.conv_backward_weight: 1 call -> onednn",
        "relax.matmul: 3 calls -> onednn",
        "accumulate: 1 call -> onednn, because only a sum reads the matmul",
    }
    assert amp_ir.compile(traced("bfloat16")[0]).report.dispatched == profile.dispatched


def test_casts_modules_and_dtypes_are_named(profile: KernelProfile) -> None:
    casts = [one for one in profile.calls if one.is_cast and one.phase == "forward"]
    assert casts and all(set(one.ops) <= {"cast", "astype"} for one in casts)
    assert 0 < profile.cast_share < 1
    matmuls = [one for one in profile.calls if one.ops == ("matmul",)]
    assert {one.dtype for one in matmuls} == {"bfloat16"}
    assert {one.modules for one in matmuls} == {("scores",)}
    assert all(one.speed_of_light_milliseconds > 0 for one in matmuls)


def call(name: str, *, is_cast: bool = False) -> PlannedCall:
    return PlannedCall(name, name, ("add",), (), 3_000_000, 1_000_000, is_cast)


def synthetic(gpu: GpuSteps | None = None) -> KernelProfile:
    """Two calls in three steps; at the peaks the first takes 4 ms and the second 1 ms."""
    plan = MemoryPlan(0, 0, (), 0, 0, 0, calls=(call("a"), call("b", is_cast=True)))
    times = [
        StepTimes(length, (0.0, 5.0), (5.0 + extra, 7.0))
        for length, extra in ((10.0, 0.0), (30.0, 0.0), (20.0, 9.0))
    ]
    peaks = MachinePeaks({"float32": 1.0}, 4.0, "2 threads")
    notes = (DispatchNote("relax.matmul", "torch", 2, "onednn is not built"),)
    planned = PlannedStep(tvm.IRModule(), plan, notes)
    return profile_of(planned, (4_000_000, 0), times, peaks, gpu)


def test_shares_follow_from_medians_and_peaks() -> None:
    """The median step is 30 % outside of its calls, whose medians of 5 and 2 ms share the rest."""
    profile = synthetic()
    assert profile.step_milliseconds == 20.0
    assert [one.milliseconds for one in profile.kernels] == pytest.approx([10.0, 4.0])
    assert [one.speed_of_light_milliseconds for one in profile.kernels] == [4.0, 1.0]
    assert [one.roofline_share for one in profile.kernels] == pytest.approx([0.4, 0.25])
    assert [one.gflop_per_second for one in profile.kernels] == pytest.approx([0.4, 0.0])
    assert profile.cast_share == pytest.approx(0.2)
    assert profile.speed_of_light_share == 0.25
    assert profile.overhead_share == pytest.approx(0.3)


def test_the_text_and_the_json_say_the_same() -> None:
    profile = synthetic()
    assert profile.headline() == (
        "20.0 ms a step (median of 3), in kernels 14.0 ms: other 14.0\n"
        "casts alone 20.0%, outside of kernels 30.0%, 25% of the speed of light at this "
        "machine's peaks (float32 1 GFLOP/s, 4.0 GB/s, 2 threads)"
    )
    lines = str(profile).splitlines()
    assert lines[-1] == "relax.matmul: 2 calls -> torch, because onednn is not built"
    assert lines[-4].split() == ["a", "f32", "add", "-", "1", "10.00", "50.0%", "3.8", "0.00",
                                 "0", "40%"]  # fmt: skip
    document = json.loads(profile.to_json())
    assert document["cast_share"] == pytest.approx(0.2)
    assert document["dispatched"][0]["reason"] == "onednn is not built"
    assert [one["name"] for one in document["kernels"]] == ["a", "b"]
    assert document["kernels"][0]["roofline_share"] == pytest.approx(0.4)


def test_the_names_of_01_still_work() -> None:
    profile = synthetic()
    for owner, old, new in (
        (profile, "floor_share", "speed_of_light_share"),
        (profile.calls[0], "floor_milliseconds", "speed_of_light_milliseconds"),
        (profile.kernels[0], "floor_milliseconds", "speed_of_light_milliseconds"),
    ):
        kind = type(owner).__name__
        message = (
            f"{kind}.{old} is called {kind}.{new} now; the old name goes in the next minor version"
        )
        with pytest.warns(DeprecationWarning, match=f"^{re.escape(message)}$"):
            assert getattr(owner, old) == getattr(owner, new)
    document = json.loads(profile.to_json())
    assert document["floor_share"] == document["speed_of_light_share"] == 0.25
    assert [one["floor_milliseconds"] for one in document["kernels"]] == [4.0, 1.0]
    assert all("floor_milliseconds" in one for one in document["calls"])


def test_a_narrow_terminal_shows_where_the_time_goes(profile: KernelProfile) -> None:
    """Figures of the roofline are left out; those that are shown are whole."""
    console = Console(file=io.StringIO(), width=80, record=True)
    console.print(profile)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    (header,) = (line for line in text.splitlines() if line.startswith("kernel "))
    assert header.split() == ["kernel", "ops", "modules", "phase", "calls", "ms", "share"]
    shares = [f"{one.milliseconds / profile.step_milliseconds:.1%}" for one in profile.kernels]
    assert all(f" {share}\n" in text for share in shares)


def on_gpu(*, is_graph: bool) -> KernelProfile:
    steps = GpuSteps(0.5, 0.8, 0.0021, is_graph)
    peaks = MachinePeaks({"float32": 5e4, "bfloat16": 8e5}, 4300.0, "NVIDIA H200 without TF32")
    return attrs.evolve(synthetic(steps), peaks=peaks)


def test_a_gpus_kernels_stand_beside_the_graph_and_the_launches() -> None:
    assert on_gpu(is_graph=True).headline() == (
        "0.500 ms a step as one CUDA graph, 0.800 ms launch by launch (median of 3 each)\n"
        "kernels are timed by CUDA events around each launch, outside of the graph; an event adds "
        "2.1 us; in kernels 7.000 ms: other 7.000\n"
        "casts alone 400.0%, 1000% of the speed of light at this "
        "machine's peaks (float32 50, bfloat16 800 TFLOP/s, 4300.0 GB/s, NVIDIA H200 without TF32)"
    )
    lines = str(on_gpu(is_graph=True)).splitlines()
    assert lines[-5].split()[-2:] == ["TFLOP/s", "roofline"]
    assert lines[-4].split()[-6:] == ["5.0000", "1000.0%", "3.8", "0.00", "0.00", "80%"]
    document = json.loads(on_gpu(is_graph=True).to_json())
    assert document["gpu"] == {
        "milliseconds": 0.5,
        "launched_milliseconds": 0.8,
        "event_milliseconds": 0.0021,
        "is_graph": True,
    }
    assert on_gpu(is_graph=False).headline().splitlines()[0] == (
        "0.500 ms a step launch by launch (median of 3); its CUDA graph could not be recorded"
    )


def test_the_trace_has_an_event_a_call_and_a_counter(
    profile: KernelProfile, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    profile.save_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    spans = [one for one in events if one["ph"] == "X"]
    assert len(spans) == len(profile.calls)
    assert spans[0]["ts"] == pytest.approx(profile.calls[0].begin_milliseconds * 1e3)
    assert {one["cat"] for one in spans} == {"kernel", "cast"}
    counted = [one["args"]["MiB"] for one in events if one["ph"] == "C"]
    assert max(counted) == pytest.approx(max(profile.held_nbytes) / 2**20, abs=1e-3)
    names = {one["tid"]: one["args"]["name"] for one in events if one["ph"] == "M"}
    assert names == {1: "forward", 2: "backward", 3: "optimizer", 4: "other"}


def test_the_machine_is_measured_once() -> None:
    peaks = measure_peaks()
    assert peaks is measure_peaks()
    assert peaks.gflop_per_second["float32"] > 0 and peaks.gigabytes_per_second > 0
    floor = peaks.speed_of_light_milliseconds(0, 10**9, "int64")
    assert floor == pytest.approx(1e3 / peaks.gigabytes_per_second)


@pytest.mark.parametrize("is_fast", [False, True])
def test_pytorch_is_measured_in_bfloat16_where_it_has_instructions(
    is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere one of its products of 2048 rows takes half a minute."""
    monkeypatch.setattr(native, "has_fast_bfloat16", lambda: is_fast)
    assert ("bfloat16 torch 2048 x 2048 x 2048" in cpu_trials()) == is_fast
    assert "float32 torch 2048 x 2048 x 2048" in cpu_trials()


def test_a_dtype_that_no_library_multiplies_has_the_rate_of_float32() -> None:
    square = "2048 x 2048 x 2048"
    seconds = {f"float32 torch {square}": 0.5, f"float32 onednn {square}": 0.25, "copy": 1.0}
    peaks = cpu_peaks(seconds, "2 threads")
    assert set(peaks.gflop_per_second.values()) == {2 * 2048**3 / 0.25 / 1e9}
    assert set(peaks.gflop_per_second) == {"float32", "bfloat16", "float16"}
    slower = cpu_peaks({**seconds, f"bfloat16 onednn {square}": 0.5}, "2 threads")
    assert slower.gflop_per_second["bfloat16"] == 2 * 2048**3 / 0.5 / 1e9


def test_the_shape_that_is_multiplied_fastest_is_the_peak() -> None:
    shapes = {"2048 x 2048 x 2048": 0.5, "4096 x 1024 x 1024": 0.2}
    seconds = {f"bfloat16 torch {shape}": took for shape, took in shapes.items()}
    peaks = cpu_peaks({**seconds, "float32 torch 2048 x 2048 x 2048": 4.0, "copy": 1.0}, "2")
    assert peaks.gflop_per_second["bfloat16"] == 2 * 4096 * 1024 * 1024 / 0.2 / 1e9


def test_wrong_uses_say_what_to_pass() -> None:
    mod, args = traced()
    with pytest.raises(OptionError) as caught:
        amp_ir.profile_kernels(mod, "cpu", args, steps=0)
    expected = "steps=0 steps cannot be run; expected a whole number of at least 1"
    assert str(caught.value) == expected
    with pytest.raises(OptionError) as caught:
        amp_ir.profile_kernels(mod.ir, "cpu", args)
    assert str(caught.value) == (
        "profile_kernels takes a StepModule and got IRModule; make one with "
        "amp_ir.trace_step(step, example_batch, model=..., optimizer=...)"
    )
