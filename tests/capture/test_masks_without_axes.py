# SPDX-License-Identifier: Apache-2.0
"""Assignments through a mask of one number, `x[x > 0] = 1` of a tensor without axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir

ASSIGNMENTS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "a number": lambda y, h: y.__setitem__(y > 0, 0.5),
    "a tensor": lambda y, h: y.__setitem__(y > 0, h.sum()),
    "all of a vector": lambda y, h: h.__setitem__(y > 0, 2.0),
    "a vector": lambda y, h: h.__setitem__(y > 0, h.flip(0)),
}


class Scale(nn.Module):
    """A parameter without axes, and one with them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.weight = nn.Parameter(torch.tensor([0.5, -1.0, 1.5]))


def assert_as_eager(make: Callable[[], tuple[nn.Module, Any, Callable[..., Any]]]) -> None:
    (model, optimizer, step), (other, _, eager) = make(), make()
    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    for k in range(5):
        x = torch.tensor([1.0, -2.0, 0.5]) * (-1) ** k
        torch.testing.assert_close(train(x), eager(x))
        for one, its in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one, its)


def test_rprop_of_a_parameter_without_axes() -> None:
    def make() -> tuple[nn.Module, Any, Callable[..., Any]]:
        model = Scale()
        optimizer = torch.optim.Rprop(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = (model.scale * model.weight * x - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return model, optimizer, step

    assert_as_eager(make)


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_assignments_and_their_gradients(name: str) -> None:
    def make() -> tuple[nn.Module, Any, Callable[..., Any]]:
        model = Scale()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            h = model.weight * x
            y = model.scale * x[0]
            ASSIGNMENTS[name](y, h)
            loss = (y + 3 * h + 0.1 * model.scale).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return model, optimizer, step

    assert_as_eager(make)
