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
