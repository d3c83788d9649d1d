# SPDX-License-Identifier: Apache-2.0
"""A convolution's time is measured at its own shape, once."""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.api import convolution_times
from amp_ir.api.estimate import estimate_step
from amp_ir.host.machine_model import Curve, MachineModel
from amp_ir.ir.library_call import LibraryConvolution

MACHINE = MachineModel(
    "a test's", "cpu", {name: Curve(((1.0, 1.0),)) for name in ("float32", "bfloat16")},
    Curve(((1.0, 100.0),)), call_microseconds=2.0, units=0, multiple=16, source="a test",
    times_convolutions=True,
)  # fmt: skip


def captured() -> amp_ir.StepModule:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Conv2d(8, 8, 1),
        nn.Conv2d(8, 8, 1),
    )

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    return amp_ir.trace_step(step, (torch.randn(2, 3, 16, 16),), model=model)[0]


@pytest.mark.parametrize("amp_dtype", ["float32", "bfloat16"])
def test_a_convolution_takes_its_measured_time(monkeypatch, amp_dtype):
    mod = captured()
    if amp_dtype != "float32":
        mod = amp_ir.autocast(mod, amp_dtype=amp_dtype)
    timed: list[LibraryConvolution] = []
    monkeypatch.setattr(
        "amp_ir.api.estimate.convolution_milliseconds", lambda call, _out: timed.append(call) or 7.0
    )
    found = estimate_step(mod, MACHINE)
    assert {one.verb for one in timed} == {"conv", "conv_backward_input", "conv_backward_weight"}
    as_matmuls = estimate_step(mod, attrs.evolve(MACHINE, times_convolutions=False))
    assert len(timed) == sum(one.milliseconds == pytest.approx(7.0) for one in found.calls)
    assert found.milliseconds > as_matmuls.milliseconds


@pytest.mark.parametrize("amp_dtype", ["float32", "bfloat16", "float16"])
def test_every_convolution_of_a_step_can_be_timed_and_equal_ones_once(monkeypatch, amp_dtype):
    mod = captured()
    if amp_dtype != "float32":
        mod = amp_ir.autocast(mod, amp_dtype=amp_dtype)
    convolution_times._milliseconds.cache_clear()
    took = convolution_times.best_seconds
    timed = []

    def counted(call, *, trials):
        timed.append(took(call, trials=trials))
        return timed[-1]

    monkeypatch.setattr(convolution_times, "best_seconds", counted)
    first = estimate_step(mod, MACHINE).milliseconds
    # Equal layers once: 3 forward, 2 gradients of images, 3 of weights.
    assert len(timed) == 3 + 2 + 3
    assert min(timed) > 0.0
    assert estimate_step(mod, MACHINE).milliseconds == first
    assert len(timed) == 3 + 2 + 3
