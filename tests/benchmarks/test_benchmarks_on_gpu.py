# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark measures what it says; here on a CPU, at the shapes of a test."""

from __future__ import annotations

import pytest
import torch
from benchmarks import host_waits, on_gpu


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_row_has_ours_and_pytorchs_times(precision: str):
    stages: list[str] = []
    row = on_gpu.measure("mlp", precision, rounds=2, small=True, tell=stages.append, device="cpu")
    assert stages == ["ours", "eager", "in turns"]
    assert set(row.milliseconds) == {"ours", "eager"}
    assert min(row.milliseconds.values()) > 0
    assert (row.scaler_cost is not None) == (precision == "float16")
    assert row.waits is None and row.speed_of_light_share > 0
    assert row.best == ("eager", row.milliseconds["eager"])
    table = on_gpu.table_of([row])
    assert table.row_count == 1


def test_the_fused_optimizer_trains_as_the_plain_one():
    trainings = [on_gpu.ON_GPU["gpt2"].make(small=True) for _ in range(2)]
    trainings[1] = on_gpu._with_fused_optimizer(trainings[1])
    assert trainings[1].optimizer.defaults["fused"]
    for training in trainings:
        for _ in range(2):
            training.step(*training.batch)
    for plain, fused in zip(*(one.model.parameters() for one in trainings), strict=True):
        torch.testing.assert_close(plain, fused)


def test_waits_are_counted_within_the_step_alone():
    """PyTorch's profiler waits for the GPU at its end, which is not the step's doing."""
    call = torch.profiler.record_function
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        with call("cudaStreamSynchronize"):
            pass
        with call(host_waits._STEP), call("cudaGraphLaunch"), call("cudaStreamSynchronize"):
            torch.ones(3).add_(1)
        with call("cudaDeviceSynchronize"), call("Memcpy DtoH (Device -> Pageable)"):
            pass
    calls = host_waits.calls_in(found.events())
    assert calls["cudaGraphLaunch"] == 1
    assert host_waits.waits_in(calls) == {
        "cudaStreamSynchronize": 1,
        "Memcpy DtoH (Device -> Pageable)": 1,
    }
