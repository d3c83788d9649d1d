# SPDX-License-Identifier: Apache-2.0
"""In-place ops on what a step computes from constants of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

import amp_ir

MASK = torch.tensor([[1.0, 0.0, 1.0, 0.0]] * 3)
NUMBERS = torch.arange(4.0)
LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "target and weight": lambda y: F.binary_cross_entropy_with_logits(
        y, MASK, pos_weight=torch.ones(4)
    ),
    "captured weight": lambda y: F.binary_cross_entropy_with_logits(y, MASK, pos_weight=NUMBERS),
    "binary": lambda y: (y * (1 - NUMBERS).sub_(0.5).mul_(2.0).div_(3.0)).mean(),
    "unary": lambda y: (y * NUMBERS.neg().exp_().clamp_(min=0.1).sqrt_().tanh_()).mean(),
    "ternary": lambda y: (y * NUMBERS.clone().addcmul_(NUMBERS, NUMBERS, value=0.5)).mean(),
    "masked": lambda y: (y * (NUMBERS > 1).float().masked_fill_(NUMBERS > 2, 7.0)).mean(),
    "view": lambda y: (y.t() * NUMBERS.clone().unsqueeze_(1)).mean(),
    "part": lambda y: (y * _with_part_written()).mean(),
    "twice": lambda y: (y * MASK.clone().add_(1) + MASK).mean(),
    "fresh": lambda y: (y * torch.zeros(4).fill_(2.0).add_(NUMBERS)).mean(),
}


def _with_part_written() -> torch.Tensor:
    values = NUMBERS * 2
    values[1:3].mul_(10.0)
    values[0] = 5.0
    return values


def test_they_compute_as_in_eager_and_leave_the_constants_alone():
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 4)
    x = torch.randn(3, 5)
    constants = MASK.clone(), NUMBERS.clone()

    def step(x: torch.Tensor) -> dict[str, torch.Tensor]:
        losses = {name: loss(model(x)) for name, loss in LOSSES.items()}
        torch.stack(list(losses.values())).sum().backward()
        return losses

    found = amp_ir.jit(step, model=model)(x)
    gradient = model.weight.grad
    assert gradient is not None
    model.zero_grad()
    expected = step(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, model.weight.grad)
    assert torch.equal(MASK, constants[0]) and torch.equal(NUMBERS, constants[1])
