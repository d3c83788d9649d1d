# SPDX-License-Identifier: Apache-2.0
"""The profile by kernel for `device="cuda"`, in the emulator: events, graphs, table and page.

What the times are on a real GPU is asked in test_gpu_profile.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm_ffi

import amp_ir
from amp_ir import cli
from amp_ir.demo.workloads import WORKLOADS
from cuda_emulator import in_emulator


def captured() -> tuple[Any, amp_ir.StepModule]:
    training = WORKLOADS["mlp"].make(small=True)
    mod, _ = amp_ir.trace_step(
        training.step, training.batch, model=training.model, optimizer=training.optimizer
    )
    return training, amp_ir.autocast(mod, training.batch, amp_dtype="bfloat16")


@in_emulator
def test_every_call_lies_between_two_events_and_the_step_beside_its_graph():
    from cuda_emulator import as_cuda

    training, mod = captured()
    before = {k: v.clone() for k, v in mod.state.items() if isinstance(v, torch.Tensor)}
    with as_cuda.as_cuda():
        profile = amp_ir.profile_kernels(mod, "cuda", training.batch, steps=2, warmup=1)
    assert all(torch.equal(mod.state[name], value) for name, value in before.items())
    assert profile.gpu is not None and profile.gpu.is_graph
    assert profile.step_milliseconds == profile.gpu.milliseconds > 0
    assert profile.gpu.launched_milliseconds > 0
    # Events of one step, in the order of the stream.
    times = [(one.begin_milliseconds, one.shown_milliseconds) for one in profile.calls]
    assert all(spent >= 0 for _, spent in times)
    ends = [begin + spent for begin, spent in times]
    assert all(end <= begin + 1e-6 for end, (begin, _) in zip(ends, times[1:], strict=False))
    names = {one.name.rpartition("_")[0] or one.name for one in profile.calls}
    assert {"cublaslt.matmul", "kernel"} <= names
    assert {one.phase for one in profile.calls} == {"forward", "backward", "optimizer"}
    assert {str(note) for note in profile.dispatched} == {"relax.matmul: 8 calls -> cublaslt"}
    assert profile.peaks.machine == "emulated GPU without TF32"
    assert {"float32", "bfloat16", "float16"} == set(profile.peaks.gflop_per_second)


@in_emulator
def test_a_timed_step_waits_for_the_gpu_once():
    from amp_ir import pipeline
    from amp_ir.api import compile as compilation
    from amp_ir.ir import target
    from amp_ir.runtime.launch_times import time_launches
    from amp_ir.vm import build
    from cuda_emulator import as_cuda, device

    training, mod = captured()
    with as_cuda.as_cuda():
        planned = pipeline.lower(mod, target=target.cuda("sm_90"))
        executable = build.build(planned, target.cuda("sm_90"), "cuda", opt_level=3)
        program = compilation.Program(executable, planned.plan, mod.signature, mod.state, "cuda")
        device.counters()
        found = time_launches(program, training.batch, warmup=1, steps=2)
        seen = device.counters()
    # One before the first step, and one at the end of each.
    assert seen.synchronisations == 1 + 3
    assert (seen.graph_launches, seen.allocations, seen.copies) == (0, 0, 0)
    assert len(found.steps) == 2 and found.event_milliseconds >= 0
    for step in found.steps:
        assert len(step.begin_milliseconds) == len(planned.plan.calls)
        assert step.end_milliseconds[-1] <= step.milliseconds + 1e-6
        assert step.outside_milliseconds >= 0


@in_emulator
def test_an_event_that_nobody_waited_for_has_no_time():
    from cuda_emulator import device

    begin, end = device.Event(enable_timing=True), device.Event(enable_timing=True)
    with pytest.raises(RuntimeError, match="an event that was not recorded is read"):
        begin.elapsed_time(end)
    begin.record()
    end.record()
    with pytest.raises(RuntimeError, match="an event is read that the host has not waited for"):
        begin.elapsed_time(end)
    device.synchronise()
    assert begin.elapsed_time(end) >= 0


@in_emulator
def test_a_step_is_one_graph_from_the_second_call_on_and_waits_for_nothing():
    from cuda_emulator import as_cuda, device

    eager = WORKLOADS["mlp"].make(small=True)
    expected = [eager.step(*eager.batch).item() for _ in range(5)]
    training = WORKLOADS["mlp"].make(small=True)
    mod, _ = amp_ir.trace_step(
        training.step, training.batch, model=training.model, optimizer=training.optimizer
    )
    with as_cuda.as_cuda():
        train = amp_ir.compile(mod, device="cuda")
        losses, seen = [], []
        for _ in range(4):
            device.counters()
            losses.append(train(*training.batch).item())
            seen.append(device.counters())
        # The recording waits, before it begins; nothing else does.
        assert [one.graph_launches for one in seen] == [0, 1, 1, 1]
        assert [one.synchronisations for one in seen] == [0, 1, 0, 0]
        assert {(one.copies, one.allocations, one.frees) for one in seen} == {(0, 0, 0)}
        assert len({one.launches for one in seen}) == 1
        # A parameter that is stored elsewhere is not where the graph reads.
        weight = next(training.model.parameters())
        weight.data = weight.data.clone()
        device.counters()
        losses.append(train(*training.batch).item())
        assert device.counters().graph_launches == 0 and not train.program.is_graph
    assert losses == pytest.approx(expected, rel=1e-5)


@in_emulator
def test_a_step_that_cannot_be_recorded_is_launched_and_says_so():
    from cuda_emulator import as_cuda, device

    eager = WORKLOADS["mlp"].make(small=True)
    expected = [eager.step(*eager.batch).item() for _ in range(4)]
    training = WORKLOADS["mlp"].make(small=True)
    mod, _ = amp_ir.trace_step(
        training.step, training.batch, model=training.model, optimizer=training.optimizer
    )
    with as_cuda.as_cuda():
        multiply = tvm_ffi.get_global_func("amp_ir.cublaslt.matmul")

        def waiting(*arguments: Any) -> None:
            device.synchronise()
            multiply(*arguments)

        tvm_ffi.register_global_func("amp_ir.cublaslt.matmul", waiting, override=True)
        train = amp_ir.compile(mod, device="cuda")
        losses = [train(*training.batch).item()]
        with pytest.warns(RuntimeWarning) as caught:
            losses.append(train(*training.batch).item())
        assert [str(one.message) for one in caught] == [
            "the step runs launch by launch: its CUDA graph could not be recorded (the host waits "
            "for the device while a stream is captured)"
        ]
        losses += [train(*training.batch).item() for _ in range(2)]
        profile = amp_ir.profile_kernels(mod, "cuda", training.batch, steps=1, warmup=0)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert profile.gpu is not None and not profile.gpu.is_graph
    assert re.fullmatch(
        r"[\d.]+ ms a step launch by launch \(median of 1\); its CUDA graph could not be recorded",
        profile.headline().splitlines()[0],
    )


@in_emulator
def test_the_command_prints_and_writes_what_a_gpu_took(tmp_path: Path):
    from cuda_emulator import as_cuda

    trace, document, page = (tmp_path / name for name in ("t.json", "p.json", "r.html"))
    words = ["mlp", "--small", "--device", "cuda", "--steps", "2"]
    printed = io.StringIO()
    with as_cuda.as_cuda(), contextlib.redirect_stdout(printed):
        files = ["--trace", str(trace), "--json", str(document)]
        assert cli.main(["profile", *words, *files]) == 0
        assert cli.main(["report", *words, "--out", str(page)]) == 0
    shown = " ".join(printed.getvalue().split())
    assert re.search(
        r"ms a step as one CUDA graph, [\d.]+ ms launch by launch \(median of 2 each\) kernels are "
        r"timed by CUDA events around each launch, outside of the graph; an event adds [\d.]+ us; "
        r"in kernels [\d.]+ ms: forward",
        shown,
    )
    assert "TFLOP/s roofline" in shown and "cublaslt.matmul" in shown
    parts = json.loads(document.read_text())
    assert parts["profile"]["gpu"]["is_graph"] is True
    assert len(parts["memory"]["timeline"]) == len(parts["profile"]["calls"])
    spans = [one for one in json.loads(trace.read_text())["traceEvents"] if one["ph"] == "X"]
    assert len(spans) == len(parts["profile"]["calls"])
    text = page.read_text()
    assert "a step as one CUDA graph, median of 2" in text
    assert "a step launched call by call, median of 2" in text
    assert "Kernels are timed by CUDA events around each launch" in text
