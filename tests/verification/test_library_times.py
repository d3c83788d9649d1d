# SPDX-License-Identifier: Apache-2.0
"""A library call's time is measured at its own shape, once."""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.api import library_times
from amp_ir.api.estimate import estimate_step
from amp_ir.dispatch import attention_call
from amp_ir.host import native
from amp_ir.host.machine_model import Curve, MachineModel
from amp_ir.ir.library_call import LibraryCall

MACHINE = MachineModel(
    "a test's", "cpu", {name: Curve(((1.0, 1.0),)) for name in ("float32", "bfloat16")},
    Curve(((1.0, 100.0),)), call_microseconds=2.0, units=0, multiple=16, source="a test",
    times_library_calls=True,
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
    timed: list[LibraryCall] = []
    monkeypatch.setattr(
        "amp_ir.api.estimate.library_milliseconds", lambda call, _out: timed.append(call) or 7.0
    )
    found = estimate_step(mod, MACHINE)
    assert {one.verb for one in timed} == {"conv", "conv_backward_input", "conv_backward_weight"}
    by_rates = estimate_step(mod, attrs.evolve(MACHINE, times_library_calls=False))
    assert len(timed) == sum(one.milliseconds == pytest.approx(7.0) for one in found.calls)
    assert found.milliseconds > by_rates.milliseconds


@pytest.mark.parametrize("amp_dtype", ["float32", "bfloat16", "float16"])
def test_every_convolution_of_a_step_can_be_timed_and_equal_ones_once(monkeypatch, amp_dtype):
    mod = captured()
    if amp_dtype != "float32":
        mod = amp_ir.autocast(mod, amp_dtype=amp_dtype)
    library_times._milliseconds.cache_clear()
    took = library_times.best_seconds
    timed = []

    def counted(call, *, trials):
        timed.append(took(call, trials=trials))
        return timed[-1]

    monkeypatch.setattr(library_times, "best_seconds", counted)
    first = estimate_step(mod, MACHINE).milliseconds
    # Equal layers once: 3 forward, 2 gradients of images, 3 of weights.
    assert len(timed) == 3 + 2 + 3
    assert min(timed) > 0.0
    assert estimate_step(mod, MACHINE).milliseconds == first
    assert len(timed) == 3 + 2 + 3


class Mixed(nn.Module):
    """Attention, a recurrent layer and packed, plain and summed matmuls."""

    def __init__(self, recurrence: str) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.layer = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[recurrence](16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.layer(mixed.transpose(1, 2).flatten(2))[0] @ x.mT


@pytest.mark.parametrize("amp_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("recurrence", ["lstm", "gru", "rnn"])
def test_every_kind_of_library_call_can_be_timed(monkeypatch, recurrence, amp_dtype):
    monkeypatch.setattr(attention_call, "_CPU_COLUMNS_LEAST", 16)
    model = Mixed(recurrence)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batch = (torch.randn(2, 128, 16),)
    mod, args = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
    if amp_dtype != "float32":
        mod = amp_ir.autocast(mod, args, amp_dtype=amp_dtype)
    took = library_times.library_milliseconds
    times: dict[str, float] = {}

    def noted(call, results):
        return times.setdefault(call.verb, took(call, results))

    monkeypatch.setattr("amp_ir.api.estimate.library_milliseconds", noted)
    estimate_step(mod, MACHINE)
    attends = amp_dtype == "float32" and native.has("amp_ir.torch.attention")
    assert {"matmul", *(["attention", "attention_backward"] if attends else [])} <= set(times)
    assert any(name.startswith(recurrence) and name.endswith("_backward") for name in times)
    assert min(times.values()) > 0.0
