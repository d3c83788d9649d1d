# SPDX-License-Identifier: Apache-2.0
"""Refusals of padding whose hints lead to a step that is proven, with the right numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import amp_ir
from amp_ir.errors import PaddingError

LENGTHS = (11, 9, 14)


def training(body: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    """Return a model, its optimizer, and a step of what `body` makes of words and their mask."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(ids, mask, labels):
        optimizer.zero_grad()
        pooled = body(model[0](ids), mask.float()[..., None])
        loss = F.cross_entropy(model[1](pooled), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, optimizer, step


def batch(length: int) -> tuple[torch.Tensor, ...]:
    ids = torch.randint(1, 50, (4, length), generator=torch.Generator().manual_seed(length))
    return ids, torch.ones_like(ids), ids[:, 0] % 3


def padded(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: Any) -> Any:
    return amp_ir.jit(
        step,
        model=model,
        optimizer=optimizer,
        buckets={name: {1: (16,)} for name in ("ids", "mask")},
        pad={"ids": 0, "mask": 0},
    )


def mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (x * mask).sum(1) / mask.sum(1)


REFUSED = {
    "roll": (
        lambda x, mask: mean(x + x.roll(1, 1), mask),
        "relax.add: a number that it takes depends on the padded length (15, or 2). Compute it "
        "from a mask; in place of x.roll(1, 1), take F.pad(x[:, :-1], (0, 0, 1, 0))",
        lambda x, mask: mean(x + F.pad(x[:, :-1], (0, 0, 1, 0)), mask),
    ),
    "unfold": (
        lambda x, mask: mean(x[:, 1:] + (x * mask).unfold(1, 2, 1).sum(-1), mask[:, 1:]),
        "relax.take: the places that it takes depend on the padded length, as those of x.unfold "
        "do. Take them by slices, such as x[:, :-1]",
        lambda x, mask: mean(x[:, 1:] + (x * mask)[:, :-1] + (x * mask)[:, 1:], mask[:, 1:]),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_follows_the_hint_is_proven(name: str) -> None:
    refused, text, hinted = REFUSED[name]
    with pytest.raises(PaddingError) as error:
        padded(*training(refused))(*batch(LENGTHS[0]))
    assert text in str(error.value)
    model, optimizer, step = training(hinted)
    train = padded(model, optimizer, step)
    other, _, eager = training(hinted)
    for length in LENGTHS:
        # Sums of eight to fourteen numbers in another order.
        torch.testing.assert_close(train(*batch(length)), eager(*batch(length)))
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not train.recompiles
