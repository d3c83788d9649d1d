# SPDX-License-Identifier: Apache-2.0
"""Steps and optimizers that compute with a learning rate are followed, or refused by their line."""

from __future__ import annotations

import cmath
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir
from amp_ir import errors

Loss = Callable[[torch.Tensor, float], torch.Tensor]
ADVICE = (
    "computes with a hyper-parameter of an optimizer in a way that would keep its value of now. "
    "Make a tensor by torch.full((), number) and compute with that, or pass the number to the "
    "step as an argument"
)


def first_row(y: torch.Tensor, rate: float) -> torch.Tensor:
    y = y.clone()
    y[0] = rate
    return y.square().mean()


def distilled(y: torch.Tensor) -> torch.Tensor:
    teacher = y.detach().flip(-1).softmax(-1)
    return F.kl_div(y.log_softmax(-1), teacher, reduction="batchmean")


def partly_negated(y: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.tensor([math.nan, 1.0]).isnan(), y, -y)


# What C, a derivative or a branch makes of the number.
KEPT: dict[str, Loss] = {
    "lerp": lambda y, rate: y.lerp(torch.ones_like(y), rate).square().mean(),
    "assigned": first_row,
    "exponent": lambda y, rate: (y.abs() + 0.1).pow(rate * 10).mean(),
    "base": lambda y, rate: ((rate + 1) ** y).mean(),
    "zero": lambda y, rate: F.dropout(y, rate * 0).square().mean(),
    "item": lambda y, rate: (y * torch.full((), rate).item()).square().mean(),
    "list": lambda y, rate: (y * sum(torch.full((2,), rate).tolist())).square().mean(),
    "method": lambda y, rate: y.square().mean() * float.__mul__(rate, 2.0),
    "fsum": lambda y, rate: y.square().mean() * math.fsum([rate, rate]),
    "cmath": lambda y, rate: y.square().mean() * cmath.sqrt(rate).real,
    "text": lambda y, rate: y.square().mean() * float("%.4f" % rate),  # noqa: UP031
    "type": lambda y, rate: y.square().mean() * (rate if type(rate) is float else 7.0),
}
FOLLOWED: dict[str, Loss] = {
    "factor": lambda y, rate: y.square().mean() * rate,
    "sum": lambda y, rate: (y + rate).square().mean() / (1 + rate),
    "filled": lambda y, rate: (y * torch.full((2,), rate)).square().mean(),
    "tensor exponent": lambda y, rate: (y.abs() + 0.1).pow(torch.full((), rate * 10)).mean(),
    "tensor lerp": lambda y, rate: y.lerp(torch.ones_like(y), torch.full((), rate)).mean(),
    "branch": lambda y, rate: y.square().mean() * (2.0 if rate > 0.04 else 3.0),
    "root": lambda y, rate: y.square().mean() * math.sqrt(rate),
    # Graphs with NaN as a constant: of `xlogy`, of the step's own, in a tensor.
    "distilled": lambda y, rate: rate * distilled(y),
    "fill": lambda y, rate: rate * y.masked_fill(y > 1, math.nan).nansum(),
    "constant": lambda y, rate: (partly_negated(y) * rate).square().mean(),
    "limits": lambda y, rate: (y.clamp(-rate, rate) * y).mean(),
}


def training(loss_of: Loss) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(x), optimizer.param_groups[0]["lr"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


@pytest.mark.parametrize("name", KEPT)
def test_what_would_keep_the_learning_rate_is_refused_by_its_line(name: str) -> None:
    model, optimizer, step = training(KEPT[name])
    with pytest.raises(errors.CaptureError) as refused:
        amp_ir.trace_step(step, (torch.randn(3, 4),), model=model, optimizer=optimizer)
    assert str(refused.value).startswith("this step cannot be captured, 1 place:\n  1. step (")
    line = re.search(r"test_followed_hypers\.py:(\d+): ", str(refused.value))
    first = KEPT[name].__code__.co_firstlineno
    assert line is not None and first <= int(line[1]) <= first + 2
    assert str(refused.value).endswith(ADVICE)
    assert optimizer.param_groups[0]["lr"] == 0.1 and not optimizer.state


@pytest.mark.parametrize("name", [*FOLLOWED, *KEPT])
def test_what_is_followed_trains_as_in_pytorch_and_an_argument_always_works(name: str) -> None:
    loss_of = FOLLOWED.get(name) or KEPT[name]
    model, optimizer, step = training(loss_of)
    twin, other, plain = training(loss_of)
    if name in KEPT:

        def step(x: torch.Tensor, rate: float) -> torch.Tensor:
            loss = loss_of(model(x), rate)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    for index in range(5):
        for one in (optimizer, other):
            one.param_groups[0]["lr"] = 0.1 / (index + 1)
        x = torch.randn(3, 4)
        found = train(x, 0.1 / (index + 1)) if name in KEPT else train(x)
        # float32, sums of at most 12 numbers, 5 steps: some roundings of 2^-24.
        torch.testing.assert_close(found, plain(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.weight, twin.weight, rtol=1e-5, atol=1e-6)


class Own(torch.optim.Optimizer):
    """An update of the user's, whose rate `scaled` may turn into a number that C makes."""

    def __init__(self, parameters: Any, scaled: Callable[[float], float]) -> None:
        super().__init__(parameters, {"lr": 0.1, "decay": 0.0, "betas": (0.9, 0.99)})
        self.scaled = scaled

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * group["decay"])
                    p.lerp_(p - p.grad, 1 - group["betas"][0])
                    p.add_(p.grad, alpha=-self.scaled(group["lr"]))


def train_with(scaled: Callable[[float], float], *, is_jitted: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = Own(model.parameters(), scaled)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = amp_ir.jit(step, model=model, optimizer=optimizer) if is_jitted else step
    for index in range(4):
        group = optimizer.param_groups[0]
        group.update(lr=0.1 / (index + 1), decay=0.01 * index, betas=(0.9 - 0.1 * index, 0.99))
        run(torch.ones(3, 4) * (index + 1))
    return model.weight.detach()


def test_an_optimizer_of_the_users_is_followed_or_refused() -> None:
    def half(rate: float) -> float:
        return rate * 0.5

    expected = train_with(half, is_jitted=False)
    torch.testing.assert_close(train_with(half, is_jitted=True), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(errors.CaptureError, match="keep its value of now"):
        train_with(lambda rate: math.fsum([rate]), is_jitted=True)
