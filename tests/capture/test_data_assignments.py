# SPDX-License-Identifier: Apache-2.0
"""Steps that assign `p.data`, three calls beside eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amp_ir
from amp_ir.errors import CaptureError

Nets = tuple[nn.Linear, nn.Linear]


def put_back(a: nn.Linear, _b: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Perturb the weights, as adversarial training does, and put them back without a copy."""
    backup = {name: p.data for name, p in a.named_parameters()}
    for p in a.parameters():
        p.data = p.data + 0.1
    moved = a(x).detach()
    for name, p in a.named_parameters():
        p.data = backup[name]
    return moved


def put_back_detached(a: nn.Linear, _b: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    before = a.weight.detach()
    a.weight.data = a.weight * 2
    moved = a(x).detach()
    a.weight.data = before
    return moved


def swap(a: nn.Linear, b: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        p.data, q.data = q.data, p.data
    return a(x).detach()


def swap_and_return(a: nn.Linear, b: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Evaluate with other weights, such as averaged ones."""
    seen = swap(a, b, x)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        kept = p.data
        p.data = q.data
        q.data = kept
    return seen


def write_to_what_was_taken(a: nn.Linear, _b: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    taken = a.weight.data
    a.weight.data = a.weight.data * 2
    taken.add_(1.0)
    return taken.clone()


def put_back_views(a: nn.Linear, _b: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    backup = {name: p.data.view(p.shape)[:] for name, p in a.named_parameters()}
    for p in a.parameters():
        p.data = p.data + 0.1
    moved = a(x).detach()
    for name, p in a.named_parameters():
        p.data = backup[name]
    return moved


def read_what_was_assigned(a: nn.Linear, _b: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """What the step makes and assigns changes with the parameter, and the parameter with it."""
    made = a.weight.data.clone()
    seen = made.detach()
    a.weight.data = made
    with torch.no_grad():
        a.weight.mul_(0.9)
    made.add_(0.1)
    return torch.stack([made, seen, a.weight.detach()]) * a(x).mean().detach()


def average(a: nn.Linear, b: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        q.data = q.data * 0.9 + p.data * 0.1
    return b(x).detach()


def assign_itself(a: nn.Linear, _b: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    a.weight.data = a.weight.data
    return a(x).detach()


def run(change: Callable[..., torch.Tensor], *, is_ours: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = F.cross_entropy(a(x), y) + 2 * F.cross_entropy(b(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), change(a, b, x)

    call = amp_ir.jit(step, model=[a, b], optimizer=optimizer) if is_ours else step
    found: list[torch.Tensor] = []
    for _ in range(3):
        found += call(torch.randn(6, 4), torch.randint(0, 4, (6,)))
    return [*found, *(p.detach() for p in (*a.parameters(), *b.parameters()))]


CHANGES = [
    put_back,
    put_back_detached,
    swap,
    swap_and_return,
    write_to_what_was_taken,
    put_back_views,
    read_what_was_assigned,
    average,
    assign_itself,
]


@pytest.mark.parametrize("change", CHANGES)
def test_an_assignment_leaves_the_old_numbers_where_they_were_taken(
    change: Callable[..., torch.Tensor],
) -> None:
    expected = run(change, is_ours=False)
    for one, other in zip(run(change, is_ours=True), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_parameters_that_share_memory_after_the_step_are_refused() -> None:
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        b.weight.data = a.weight.data
        return b(x).detach()

    with pytest.raises(CaptureError, match="assigns the data of one of weight and model1.weight"):
        amp_ir.jit(step, model=[a, b])(torch.randn(2, 4))


def sam(a: nn.Linear, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    """Perturb the weights, and put back what the optimizer's state has, as SAMs do."""
    moved = torch.zeros(())
    for p in a.parameters():
        old = optimizer.state[p].get("old")
        moved = moved if old is None else moved + (p - old).detach().abs().sum()
        optimizer.state[p]["old"] = p.data.clone()
        p.data.add_(0.1)
    a(x).square().mean().backward()
    for p in a.parameters():
        p.data = optimizer.state[p]["old"]
    optimizer.step()
    optimizer.zero_grad()
    return moved


def trained_by_sam(*, is_ours: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    a = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(a.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        return sam(a, optimizer, x)

    call = amp_ir.jit(step, model=a, optimizer=optimizer) if is_ours else step
    moved = [call(torch.randn(6, 4)) for _ in range(3)]
    return [*moved, *(one["old"] for one in optimizer.state.values()), *a.parameters()]


def test_state_that_a_step_puts_in_place_is_updated_with_the_parameter() -> None:
    pairs = zip(trained_by_sam(is_ours=True), trained_by_sam(is_ours=False), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_of_the_batch", [True, False])
def test_given_tensors_that_are_assigned_and_then_trained_are_refused(
    is_of_the_batch: bool,
) -> None:
    a, outside = nn.Linear(4, 4), torch.randn(4, 4)
    optimizer = torch.optim.SGD(a.parameters(), lr=0.1)

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        a.weight.data = weight.view(4, 4) if is_of_the_batch else outside
        loss = a(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    train = amp_ir.jit(step, model=a, optimizer=optimizer)
    with pytest.raises(CaptureError, match="given to the data of weight, and writes to it, which"):
        train(torch.randn(2, 4), torch.randn(4, 4))


def test_a_given_tensor_that_is_only_read_may_be_assigned() -> None:
    a = nn.Linear(4, 4)

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        a.weight.data = weight
        return a(x).detach()

    x, weight = torch.randn(2, 4), torch.randn(4, 4)
    found = amp_ir.jit(step, model=a)(x, weight)
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, a.bias).detach())
    assert torch.equal(a.weight, weight)


def test_state_of_an_optimizer_that_is_assigned_is_refused() -> None:
    a = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(a.parameters(), lr=0.1)
    optimizer.state[a.weight]["old"] = a.weight.detach().clone()

    def step(x: torch.Tensor) -> torch.Tensor:
        a.weight.data = optimizer.state[a.weight]["old"]
        return a(x).detach()

    with pytest.raises(CaptureError, match=r"one of weight and optimizer0\.weight\.old to the"):
        amp_ir.jit(step, model=a, optimizer=optimizer)(torch.randn(2, 4))
