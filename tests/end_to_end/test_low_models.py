# SPDX-License-Identifier: Apache-2.0
"""Models whose parameters are low themselves, as with apex's O3: captured as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import amp_ir

STEPS = 5


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(256, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 10),
    )  # fmt: skip


def train(model: nn.Module, make: Callable[..., Callable[..., torch.Tensor]]) -> list[float]:
    """Train for some steps; return the losses."""
    dtype = next(model.parameters()).dtype
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = make(step, model=model, optimizer=optimizer)
    draws = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(16, 3, 12, 12, generator=draws), torch.randint(0, 10, (16,), generator=draws))
        for _ in range(STEPS)
    ]
    return [float(run(images.to(dtype), labels)) for images, labels in batches]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_low_model_trains_as_in_pytorch(dtype: torch.dtype) -> None:
    exact, theirs = classifier().double(), classifier().to(dtype)
    ours = copy.deepcopy(theirs)
    expected = train(exact, lambda step, **_: step)
    eager = train(theirs, lambda step, **_: step)
    losses = train(ours, amp_ir.jit)
    assert {one.dtype for one in ours.parameters()} == {dtype}

    def error(found: list[float]) -> float:
        return max(abs(a - b) / b for a, b in zip(found, expected, strict=True))

    # Weights rounded at every step: both walk away from float64, by other roundings. Twice eager's
    # error, or a rounding of the loss (2^-8 for bfloat16).
    assert error(losses) <= max(2 * error(eager), 2**-8), (losses, eager, expected)
