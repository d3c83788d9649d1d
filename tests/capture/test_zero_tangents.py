# SPDX-License-Identifier: Apache-2.0
"""Forward mode beside eager PyTorch, where a tangent of zeros meets an infinity."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir

Function = Callable[[torch.Tensor, torch.Tensor], Any]
X = torch.tensor([math.inf, 1.0, -math.inf, 0.0])
Y = torch.tensor([2.0, 3.0, 0.0, math.inf])

FUNCTIONS: dict[str, Function] = {
    "product": lambda a, y: a * y,
    "product with a detached": lambda a, y: a.detach() * a,
    "quotient": lambda a, y: (a / (y + 1), y / (a + 1)),
    "addcmul": lambda a, y: torch.addcmul(y, a, y),
    "by a number": lambda a, y: (a * 0 + 0, a * math.inf),
    "of concatenated": lambda a, y: torch.cat([a, y]) * torch.cat([y, a]),
    "viewed": lambda a, y: a * y.view(2, 2).t().reshape(4),
    "maximum": lambda a, y: torch.maximum(a, y) * y,
    "rounded": lambda a, y: torch.round(a) * y + a.sign() * y,
    "dot": lambda a, y: torch.dot(a[1:2], y[1:2]) * y,
    "of a result without a tangent": lambda a, y: (a * y, y * 2),
}


def assert_same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_tangent(name: str) -> None:
    def step(x: torch.Tensor, y: torch.Tensor, tangent: torch.Tensor) -> Any:
        return torch.func.jvp(lambda a: FUNCTIONS[name](a, y), (x,), (tangent,))

    train = amp_ir.jit(step, model=nn.Linear(1, 1))
    for tangent in (torch.ones(4), torch.zeros(4), X):
        assert_same(train(X, Y, tangent), step(X, Y, tangent))


@pytest.mark.parametrize("name", ["product", "rounded", "addcmul"])
def test_a_jacobian(name: str) -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        return torch.func.jacfwd(lambda a: FUNCTIONS[name](a, y) + a)(x)

    assert_same(amp_ir.jit(step, model=nn.Linear(1, 1))(X, Y), step(X, Y))


def test_training_through_tangents_beside_infinities() -> None:
    """What is infinite times weights, whose tangent is 0: three steps."""

    def make() -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            _, slope = torch.func.jvp(lambda a: a * model.weight, (x,), (torch.ones_like(x),))
            loss = slope.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return model, optimizer, step

    (model, optimizer, step), (other, _, eager) = make(), make()
    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    for shift in range(3):
        x = X.roll(shift)
        loss, wanted = train(x), eager(x)
        assert wanted.isfinite()
        torch.testing.assert_close(loss, wanted)
        for one, its in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one, its)
