# SPDX-License-Identifier: Apache-2.0
"""Floats times integers whose bounds are known: TVM (0.27) asserted where a product had a name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import amp_ir

FACTORS = {
    "positions": lambda ids: torch.arange(17).float(),
    "distances": lambda ids: (torch.arange(6)[:, None] - torch.arange(17)).abs().float(),
    "remainders": lambda ids: (torch.arange(17) % 5).double().float(),
    "clamped": lambda ids: ids.clamp(0, 10).float(),
    "unsigned": lambda ids: torch.arange(17).to(torch.uint8).float(),
    "mask": lambda ids: (torch.arange(17) > 3).int().float(),
}


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.weight, self.factor = nn.Parameter(torch.randn(6, 17)), factor

    def forward(self, x, ids):
        return (self.weight * x * self.factor(ids)).softmax(-1)


def trained(model, batches, *, compiles):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, ids):
        rows = model(x, ids)
        loss = (rows * rows).sum() + rows.sin().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = amp_ir.jit(step, model=model, optimizer=optimizer) if compiles else step
    return torch.stack([run(*batch) for batch in batches])


@pytest.mark.parametrize("factor", FACTORS.values(), ids=FACTORS)
def test_a_softmax_of_a_product_with_positions_trains(factor):
    torch.manual_seed(0)
    model = Scaled(factor)
    expected = copy.deepcopy(model)
    batches = [(torch.randn(()), torch.randint(0, 20, (6, 17))) for _ in range(3)]
    losses = trained(model, batches, compiles=True)
    # float32 sums of 17 terms in another order, over three steps.
    torch.testing.assert_close(losses, trained(expected, batches, compiles=False))
    torch.testing.assert_close(model.weight, expected.weight)
