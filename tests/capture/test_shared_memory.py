# SPDX-License-Identifier: Apache-2.0
"""Gradients and optimizer state that share memory are refused, and the repair in the text works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amp_ir
from amp_ir.errors import ArgumentError, CaptureError, StateError


class Counting(torch.optim.Optimizer):
    """SGD with a count of steps for each parameter."""

    def __init__(self, parameters: Any, count: Callable[[], torch.Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        for p in self.param_groups[0]["params"]:
            self.state[p]["count"] = count()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["count"] += 1
            p.sub_(0.1 * p.grad / self.state[p]["count"])


def setting() -> tuple[nn.Linear, nn.Linear, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return nn.Linear(4, 4), nn.Linear(4, 4), (torch.randn(3, 4), torch.randn(3, 4))


def own_memory(optimizer: torch.optim.Optimizer) -> None:
    for one in optimizer.state.values():
        one.update({key: value.clone() for key, value in one.items() if torch.is_tensor(value)})


def test_a_count_of_all_parameters() -> None:
    model, _, batch = setting()
    count = torch.zeros(())
    optimizer = Counting(model.parameters(), lambda: count)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    with pytest.raises(ArgumentError, match=r"weight\.count and optimizer0\.bias\.count share"):
        train(*batch)
    own_memory(optimizer)
    train(*batch)
    assert [int(one["count"]) for one in optimizer.state.values()] == [1, 1]


def test_a_backup_that_a_step_in_pytorch_has_put_in_place() -> None:
    """As SAM does: p.data = state["old"]; the step would write the backup over the weights."""
    model, _, batch = setting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for p in model.parameters():
            optimizer.state[p]["old"] = p.data.clone()
            p.data.add_(0.1)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for p in model.parameters():
            p.data = optimizer.state[p]["old"]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step(*batch)
    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    with pytest.raises(ArgumentError, match=r"weight\.old.* share memory|share memory"):
        train(*batch)
    own_memory(optimizer)
    before = model.weight.detach().clone()
    losses = [float(train(*batch)) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    assert not torch.equal(model.weight, before)


def test_gradients_of_two_parameters() -> None:
    a, b, batch = setting()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(a(x), b(y))
        loss.backward()
        return loss.detach()

    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        p.grad = torch.zeros_like(p)
        q.grad = p.grad
    train = amp_ir.jit(step, model=[a, b])
    with pytest.raises(ArgumentError, match=r"p\.grad = p\.grad\.clone\(\)"):
        train(*batch)
    for p in b.parameters():
        p.grad = p.grad.clone()
    train(*batch)


def test_a_gradient_that_two_parameters_have_at_a_later_call() -> None:
    a, b, batch = setting()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(a(x), b(y))
        loss.backward()
        return loss.detach()

    train = amp_ir.jit(step, model=[a, b])
    for _ in range(2):
        train(*batch)
    b.weight.grad, before = a.weight.grad, a.weight.grad.clone()
    with pytest.raises(StateError, match=r"share memory.*p\.grad = p\.grad\.clone\(\)"):
        train(*batch)
    assert torch.equal(a.weight.grad, before)
    b.weight.grad = b.weight.grad.clone()
    train(*batch)
    assert not torch.equal(a.weight.grad, before)


def test_a_gradient_that_is_left_to_two_parameters() -> None:
    a, b, batch = setting()
    is_copied = False

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(a(x), b(y))
        loss.backward()
        b.weight.grad = a.weight.grad.clone() if is_copied else a.weight.grad
        return loss.detach()

    train = amp_ir.jit(step, model=[a, b])
    with pytest.raises(CaptureError, match=r"leaves one tensor in weight\.grad and model1\.weight"):
        train(*batch)
    is_copied = True
    train(*batch)
    assert torch.equal(a.weight.grad, b.weight.grad)


def test_parts_of_one_buffer_are_no_shared_gradients() -> None:
    a, _, batch = setting()
    buffer = torch.zeros(32)
    a.weight.grad, a.bias.grad = buffer[:16].view(4, 4), buffer[16:20]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(a(x), y)
        loss.backward()
        return loss.detach()

    amp_ir.jit(step, model=a)(*batch)
    assert float(buffer.abs().sum()) > 0
