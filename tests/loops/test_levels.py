# SPDX-License-Identifier: Apache-2.0
"""What a kernel may write over: values of a row, too, such as running statistics."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.api import lower
from amp_ir.ir.step_module import StepModule

ROWS, SIDE, CHANNELS = 16, 16, 8


class Blocks(nn.Module):
    """Eight times convolution, batch normalization and relu."""

    def __init__(self) -> None:
        super().__init__()
        parts = [
            part
            for k in range(8)
            for part in (
                nn.Conv2d(CHANNELS if k else 3, CHANNELS, 3, padding=1, bias=False),
                nn.BatchNorm2d(CHANNELS),
                nn.ReLU(),
            )
        ]
        self.parts = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts(x)


def training(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, optimizer


def traced() -> tuple[StepModule, nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    model = Blocks()
    step, optimizer = training(model)
    batch = (torch.randn(ROWS, 3, SIDE, SIDE),)
    mod, args = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
    return mod, model, args


def test_running_statistics_are_written_where_they_lie() -> None:
    mod, _, _ = traced()
    calls = lower(mod).plan.calls
    assert any("batch_norm" in call.ops for call in calls)
    assert not any(call.ops == ("copy",) for call in calls)


def budget_that_normalizes_again(mod: StepModule) -> int:
    """The loosest of some budgets for which a batch normalization runs twice."""
    free = lower(mod).plan
    for share in (0.9, 0.85, 0.8, 0.75, 0.7):
        budget = free.state_bytes + int(share * (free.peak_bytes - free.state_bytes))
        calls = lower(mod, memory_budget=budget).plan.calls
        if any("batch_norm" in call.ops for call in calls if call.is_rerun):
            return budget
    raise AssertionError("no batch normalization is run again")


@pytest.mark.parametrize("is_run_again", [False, True])
def test_a_step_leaves_pytorchs_running_statistics(is_run_again: bool) -> None:
    """Also where a normalization runs twice, which must not count its batch twice."""
    mod, model, args = traced()
    peer = copy.deepcopy(model)
    peer_step, _ = training(peer)
    budget = budget_that_normalizes_again(mod) if is_run_again else None
    train = amp_ir.compile(mod, memory_budget=budget)
    for _ in range(3):
        train(*args)
        peer_step(*args)
    for (name, ours), theirs in zip(model.named_buffers(), peer.buffers(), strict=True):
        # Sums of 4096 float32 terms in another order.
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6), name
