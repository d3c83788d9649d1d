# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers on a CPU: one library call a layer and direction, forward and backward."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.api import lower
from amp_ir.dispatch.decompose_recurrence import decompose_recurrence
from amp_ir.dispatch.recurrence_call import recurrence_library
from amp_ir.host import native
from amp_ir.ir.dispatch_log import DispatchLog
from amp_ir.ir.memory_plan import MemoryRole
from amp_ir.memory.call_cost import flop_of_calls
from kernel_check import module_of
from square_steps import square_step

pytestmark = pytest.mark.skipif(
    not native.has("amp_ir.onednn.lstm"), reason="this build has no oneDNN"
)
STEPS, ROWS, INNER, HIDDEN = 6, 3, 10, 20
# The losses are of size 1; in low precision states and gradients are rounded at each step.
TOLERANCE = {None: 1e-5, "bfloat16": 3e-2, "float16": 4e-3}
KINDS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": functools.partial(nn.RNN, nonlinearity="relu"),
}
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


class Net(nn.Module):
    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.layers = KINDS[kind](INNER, HIDDEN, **options)
        directions = 2 if options.get("bidirectional") else 1
        self.scores = nn.Linear(directions * HIDDEN, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(self.layers(x)[0])


def step_of(model: nn.Module):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    step = square_step(model, optimizer)

    return step, optimizer


def traced(kind: str, steps: int = STEPS, amp_dtype: str | None = None, **options: Any):
    model = Net(kind, **options)
    step, optimizer = step_of(model)
    batch = (torch.randn(steps, ROWS, INNER),)
    mod, args = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
    return mod if amp_dtype is None else amp_ir.autocast(mod, args, amp_dtype=amp_dtype)


def recurrences(planned: Any) -> list[str]:
    return [one.name for one in planned.plan.calls if one.name.rpartition(".")[2] in NAMES]


NAMES = tuple(f"{kind}{suffix}" for kind in KINDS for suffix in ("", "_backward"))


@pytest.mark.parametrize("amp_dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_train_as_in_pytorch(kind: str, amp_dtype: str | None):
    # Each kind in either form, and each form in every dtype.
    is_deep = ([*KINDS].index(kind) + [*TOLERANCE].index(amp_dtype)) % 2
    options = {"num_layers": 2, "bidirectional": True} if is_deep else {}
    trained = []
    for compiles in (True, False):
        torch.manual_seed(0)
        model = Net(kind, **options)
        step, optimizer = step_of(model)
        train = step
        if compiles:
            train = amp_ir.jit(step, model=model, optimizer=optimizer, amp_dtype=amp_dtype)
        torch.manual_seed(1)
        losses = [train(torch.randn(STEPS, ROWS, INNER)) for _ in range(4)]
        trained.append((torch.stack(losses), model.layers.weight_hh_l0.detach()))
        if compiles:
            calls = 4 if options else 1
            assert [str(one) for one in train.compiled.report.dispatched if kind in one.op] == [
                f"amp_ir.{verb}: {calls} call{'s' if calls > 1 else ''} -> onednn"
                for verb in (kind, f"{kind}_backward")
            ]
    tolerance = TOLERANCE[amp_dtype]
    for ours, eager in zip(*trained, strict=True):
        torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_more_time_steps_are_no_more_calls(kind: str):
    few, many = lower(traced(kind, 3)), lower(traced(kind, 40))
    assert recurrences(few) == [f"onednn.{kind}", f"onednn.{kind}_backward"]
    # How the kernels around them fall together may differ.
    assert abs(len(few.plan.calls) - len(many.plan.calls)) <= 2


@pytest.mark.parametrize("amp_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_their_arithmetic_is_that_of_their_products(kind: str, amp_dtype: str | None):
    planned = lower(traced(kind, amp_dtype=amp_dtype))
    gates = GATES[kind]
    counts = {
        call.name: (flop, call.compute_dtype)
        for call, flop in zip(planned.plan.calls, flop_of_calls(planned), strict=True)
    }
    for verb in (kind, f"{kind}_backward"):
        expected = 2 * STEPS * ROWS * gates * HIDDEN * HIDDEN
        assert counts[f"onednn.{verb}"] == (expected, amp_dtype or "float32")


@pytest.mark.parametrize("kind", KINDS)
def test_their_workspace_is_in_the_plan(kind: str):
    """At least the weight as oneDNN lays it out, and only during the call."""
    plan = lower(traced(kind)).plan
    gates = GATES[kind]
    for verb in (kind, f"{kind}_backward"):
        (position,) = (k for k, one in enumerate(plan.calls) if one.name == f"onednn.{verb}")
        planned = (one for one in plan.values if one.role is MemoryRole.WORKSPACE)
        (workspace,) = (one for one in planned if one.first_use == one.last_use == position)
        assert workspace.nbytes >= 4 * gates * HIDDEN * HIDDEN


def test_the_library_is_the_first_that_has_the_function():
    assert recurrence_library("lstm", ("torch", "onednn")) == "onednn"
    assert recurrence_library("gru_backward", ("torch",)) is None


def notes(op: str, dtypes: list[torch.dtype], libraries: tuple[str, ...]) -> list[str]:
    shapes = {
        "amp_ir.lstm": [(2, 3, 16), (16, 4), (3, 4), (3, 4)],
        "amp_ir.gru": [(2, 3, 12), (12, 4), (12,), (3, 4)],
    }[op]
    inputs = [torch.zeros(one, dtype=dtype) for one, dtype in zip(shapes, dtypes, strict=True)]
    log = DispatchLog()
    decompose_recurrence(module_of(op, inputs, reverse=False), libraries=libraries, log=log)
    return [str(one) for one in log.notes]


def test_why_not_is_in_the_report():
    full, double, low = torch.float32, torch.float64, torch.bfloat16
    onednn = ("onednn", "torch")
    assert notes("amp_ir.lstm", [low, low, low, full], onednn) == ["amp_ir.lstm: 1 call -> onednn"]
    assert notes("amp_ir.gru", [double] * 4, onednn) == [
        "amp_ir.gru: 1 call -> matmuls and own kernels, because onednn's recurrent layers compute "
        "in one of float32, bfloat16, float16, not in float64"
    ]
    assert notes("amp_ir.lstm", [full, full, full, double], onednn) == [
        "amp_ir.lstm: 1 call -> matmuls and own kernels, because onednn's recurrent layers keep "
        "cells in float32, not in float64"
    ]
    assert notes("amp_ir.gru", [full] * 4, ("torch",)) == [
        "amp_ir.gru: 1 call -> matmuls and own kernels, because no library that amp_ir calls does "
        "it whole"
    ]
