# SPDX-License-Identifier: Apache-2.0
"""A capture leaves the methods of modules that torch.fx replaces, and marks no profile."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import amp_ir


def text_of(step: Any, model: nn.Module) -> str:
    mod, _ = amp_ir.trace_step(step, (torch.ones(2, 3),), model=model)
    return mod.script()


def test_modules_are_looked_up_and_called_by_methods_of_pytorch_or_ours() -> None:
    model, lookup = nn.Linear(3, 4), nn.Module.__getattr__

    def step(x: torch.Tensor) -> torch.Tensor:
        # Here, as a step that keeps it cannot be captured; what fails here fails the capture.
        assert nn.Module.__getattr__ is lookup
        assert nn.Module.__call__.__globals__["__name__"].startswith("amp_ir.")
        return model(x).detach()

    assert "matmul" in text_of(step, model)


def test_a_trace_that_a_step_begins_finds_its_modules() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    expected = str(torch.fx.symbolic_trace(model).graph)
    assert "call_module" in expected

    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            assert str(torch.fx.symbolic_trace(model).graph) == expected
        return model(x).detach()

    text_of(step, model)
    assert str(torch.fx.symbolic_trace(model).graph) == expected


def test_a_mark_for_a_profiler_is_made_outside_of_captures_only() -> None:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, *, is_captured: bool = True) -> torch.Tensor:
        with torch.profiler.record_function("loss") as mark:
            loss = model(x).square().mean()
            assert (mark.record is None) is is_captured
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = amp_ir.jit(step, model=model, optimizer=optimizer)(torch.ones(2, 3))
    assert losses > step(torch.ones(2, 3), is_captured=False)
