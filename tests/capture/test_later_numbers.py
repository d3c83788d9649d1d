# SPDX-License-Identifier: Apache-2.0
"""Numbers of `.item()` in functions of `math` and of PyTorch, and checks that end the process."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.errors import CheckFailedError

Inside = Callable[["Layer", torch.Tensor], Any]
TIGHT: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6}  # float32 sums of few terms, over five steps


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.full((4,), 0.5))


def batch(k: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(k))


def made(inside: Inside) -> tuple[Any, Layer, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layer = Layer()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> Any:
        loss = layer.linear(x).square().mean()
        found = inside(layer, loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return found

    return step, layer, optimizer


def jitted(inside: Inside) -> tuple[Any, Layer]:
    step, layer, optimizer = made(inside)
    return amp_ir.jit(step, model=layer, optimizer=optimizer), layer


def perplexity(_layer: Layer, loss: torch.Tensor) -> Any:
    number = loss.item()
    return math.exp(number), math.sqrt(number), math.log(number), number**2, 0.5**number


def decays(layer: Layer, _loss: torch.Tensor) -> Any:
    """As in the averages of `ema_pytorch`, which it warms up."""
    layer.steps += 1
    decay = min(0.9, (1 + layer.steps.item()) / (4 + layer.steps.item()))
    bias, average = layer.linear.bias.detach(), layer.average
    with torch.no_grad():
        average.lerp_(bias, 1 - decay)
        average.mul_(decay).add_(bias, alpha=1 - decay).sub_(bias, alpha=0.1 * decay)
        average.addcmul_(bias, bias, value=decay).addcdiv_(bias, bias.exp(), value=decay)
    others = torch.add(bias, average, alpha=decay), average.clamp(max=decay)
    return *others, torch.full((2,), decay), torch.full_like(bias, decay), torch.pow(decay, average)


def corrections(layer: Layer, _loss: torch.Tensor) -> Any:
    layer.steps += 1
    count = layer.steps.item()
    correction = 1 - 0.9**count
    return correction, layer.average / correction, count % 3, count // 2


def finite(_layer: Layer, loss: torch.Tensor) -> Any:
    number = loss.item()
    if not math.isfinite(number):
        print(f"Loss is {number}, stopping training")
        sys.exit(1)
    return number


def neither(_layer: Layer, loss: torch.Tensor) -> Any:
    if math.isnan(loss.item()):
        raise FloatingPointError("diverged")
    if math.isinf(loss.item()):
        raise FloatingPointError("diverged")
    return loss.detach()


@pytest.mark.parametrize(
    "inside", [perplexity, decays, corrections, finite, neither], ids=lambda one: one.__name__
)
def test_numbers_are_as_in_pytorch(inside: Inside) -> None:
    eager, twin, _ = made(inside)
    train, layer = jitted(inside)
    for k in range(5):
        torch.testing.assert_close(train(batch(k)), eager(batch(k)), **TIGHT)
    torch.testing.assert_close(layer.state_dict(), twin.state_dict(), **TIGHT)
    assert len(train.recompiles) <= 1


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        (finite, r"sys\.exit\(1\) \(test_later_numbers\.py:"),
        (neither, r"raise FloatingPointError\('diverged'\)"),
        (lambda _layer, loss: math.exp(1e6 * loss.item()), "math.exp: math domain or range error"),
        (lambda _layer, loss: math.log(loss.item() - 1e6), "math.log: math domain or range error"),
    ],
    ids=["exit", "raise", "range", "domain"],
)
def test_what_python_would_not_go_on_with_is_rolled_back(inside: Inside, message: str) -> None:
    train, layer = jitted(inside)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with pytest.raises(CheckFailedError, match=message):
        train(batch(0) / (0 if inside in (finite, neither) else 1))
    assert all(torch.equal(layer.state_dict()[name], value) for name, value in before.items())
