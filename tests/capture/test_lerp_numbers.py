# SPDX-License-Identifier: Apache-2.0
"""Lerps by numbers that are half, on either side of it, and whole, beside eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import amp_ir


def trained(step_of: Callable[..., Any], *, is_ours: bool) -> Any:
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 3)
    average = torch.nn.Linear(3, 3).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = step_of(model, average, optimizer)
    call = amp_ir.jit(step, model=[model, average], optimizer=optimizer) if is_ours else step
    results = [call(torch.randn(2, 3)) for _ in range(3)]
    return [*results, *model.parameters(), *average.parameters()]


def assert_as_eager(step_of: Callable[..., Any]) -> None:
    found, wanted = trained(step_of, is_ours=True), trained(step_of, is_ours=False)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights", [(0.5, 0.9), (0.9, 0.5), (-0.5, 0.5, 1.5, 2.0, -1.25)])
def test_each_lerp_has_its_own_weight(weights: tuple[float, ...]) -> None:
    # 1 - 0.5 is 0.5: the nodes of the first lerp do not show which of both they have where.
    def step_of(model: Any, average: Any, optimizer: Any) -> Any:
        def step(x: torch.Tensor) -> torch.Tensor:
            y = model(x)
            losses = [torch.lerp(y, y.sin(), weight).square().mean() for weight in weights]
            loss = torch.stack(losses).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for weight in weights:
                    for one, other in zip(average.parameters(), model.parameters(), strict=True):
                        one.lerp_(other, weight)
            return loss.detach()

        return step

    assert_as_eager(step_of)


@pytest.mark.parametrize("weight", [0, 1, 2, True])
def test_a_whole_weight(weight: int) -> None:
    def step_of(model: Any, average: Any, optimizer: Any) -> Any:
        def step(x: torch.Tensor) -> torch.Tensor:
            y = model(x)
            loss = torch.lerp(y, y.sin(), weight).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                average.weight.lerp_(model.weight, weight)
            return loss.detach()

        return step

    assert_as_eager(step_of)
