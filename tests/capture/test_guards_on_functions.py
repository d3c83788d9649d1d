# SPDX-License-Identifier: Apache-2.0
"""Replaced code and defaults of functions, and attributes that classes get over their bases'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from step_comparison import normal

Step = Callable[[torch.Tensor], torch.Tensor]
# What a program gives: the factor of its loss, and what is changed before call k.
Made = tuple[Callable[[torch.Tensor], Any], Callable[[int], Any]]


def defaults() -> Made:
    def factor(_x: torch.Tensor, weight: float = 2.0) -> float:
        return weight

    return factor, lambda k: setattr(factor, "__defaults__", (3.0 + k,))


def defaults_by_keyword() -> Made:
    def factor(_x: torch.Tensor, *, weight: float = 2.0) -> float:
        return weight

    return factor, lambda k: setattr(factor, "__kwdefaults__", {"weight": 3.0 + k})


def an_entry_of_the_defaults() -> Made:
    def factor(_x: torch.Tensor, *, weight: float = 2.0) -> float:
        return weight

    def change(k: int) -> None:
        assert factor.__kwdefaults__ is not None
        factor.__kwdefaults__["weight"] = 3.0 + k

    return factor, change


def code() -> Made:
    def factor(_x: torch.Tensor) -> float:
        return 2.0

    def other(_x: torch.Tensor) -> float:
        return 5.0

    return factor, lambda _k: setattr(factor, "__code__", other.__code__)


def code_of_a_method() -> Made:
    class Factor:
        def of(self, _x: torch.Tensor) -> float:
            return 2.0

    def other(_self: Any, _x: torch.Tensor) -> float:
        return 5.0

    held = Factor()
    return held.of, lambda _k: setattr(Factor.of, "__code__", other.__code__)


def an_attribute_over_a_bases() -> Made:
    class Base:
        weight = 2.0

    class Middle(Base):
        pass

    class Last(Middle):
        pass

    held = Last()

    def factor(_x: torch.Tensor) -> float:
        return held.weight

    return factor, lambda k: setattr(Last if k else Middle, "weight", 3.0 + k)


def a_method_over_a_bases() -> Made:
    class Base:
        def weight(self) -> float:
            return 2.0

    class Last(Base):
        pass

    held = Last()

    def factor(_x: torch.Tensor) -> float:
        return held.weight()

    return factor, lambda k: setattr(Last, "weight", lambda _self: 3.0 + k)


PROGRAMS = [
    defaults, defaults_by_keyword, an_entry_of_the_defaults, code, code_of_a_method,
    an_attribute_over_a_bases, a_method_over_a_bases,
]  # fmt: skip


def training(factor: Callable[[torch.Tensor], Any]) -> tuple[nn.Module, Any, Step]:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean() * factor(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


@pytest.mark.parametrize("build", PROGRAMS)
def test_a_change_between_calls_is_followed(build: Callable[[], Made]) -> None:
    (factor, change), (eager_factor, eager_change) = build(), build()
    model, optimizer, step = training(factor)
    _, _, eager = training(eager_factor)
    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    for k in range(3):
        x = normal(k, 5, 6)
        torch.testing.assert_close(train(x), eager(x))
        assert len(train.recompiles) <= k
        change(k)
        eager_change(k)
    assert train.recompiles


def test_the_steps_own_defaults_are_guarded() -> None:
    model, optimizer, _ = training(lambda _x: 1.0)

    def step(x: torch.Tensor, weight: float = 2.0) -> torch.Tensor:
        return (model(x).mean() * weight).detach()

    train = amp_ir.jit(step, model=model)
    x = normal(0, 5, 6)
    first = train(x)
    step.__defaults__ = (4.0,)
    torch.testing.assert_close(train(x), first * 2)
    assert "the defaults of step" in train.recompiles[0].reason
    train(x)
    assert len(train.recompiles) == 1
