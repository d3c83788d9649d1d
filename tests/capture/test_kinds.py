# SPDX-License-Identifier: Apache-2.0
"""The type of a tensor in a step is what it is in PyTorch: `type(x)`, `x.__class__`, dispatch."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import amp_ir

Weight = Callable[[Any, torch.Tensor], float]
HANDLERS: dict[type, float] = {torch.Tensor: 2.0, nn.Parameter: 3.0, nn.Linear: 5.0}


class Special(nn.Parameter):
    """A parameter that is marked by its class."""


@functools.singledispatch
def weight_of(_value: object) -> float:
    return 1.0


@weight_of.register
def _(_value: torch.Tensor) -> float:
    return 2.0


@weight_of.register
def _(_value: nn.Parameter) -> float:
    return 3.0


class Visitor:
    """Calls the method that is named after a type, as visitors do."""

    def visit(self, value: object) -> float:
        method: Callable[[], float] = getattr(self, f"visit_{type(value).__name__}")
        return method()

    def visit_Tensor(self) -> float:
        return 2.0

    def visit_Parameter(self) -> float:
        return 3.0


def by_entry(model: Any, x: torch.Tensor) -> float:
    return HANDLERS[type(x)] * HANDLERS[type(model.weight)] * HANDLERS[type(model)]


def by_default(model: Any, x: torch.Tensor) -> float:
    return HANDLERS.get(type(model.weight * x.sum()), 7.0)


def by_class(model: Any, x: torch.Tensor) -> float:
    return HANDLERS[x.__class__] * HANDLERS[model.weight.__class__]


def by_comparison(model: Any, x: torch.Tensor) -> float:
    kind = type(model.bias)
    return (2.0 if type(x) is torch.Tensor else 1.0) * (3.0 if kind == nn.Parameter else 1.0)


def by_the_users_own_class(model: Any, _x: torch.Tensor) -> float:
    return {Special: 2.0, nn.Parameter: 3.0}[type(model.special)]


def by_map(model: Any, _x: torch.Tensor) -> float:
    return 2.0 if set(map(type, model.parameters())) == {nn.Parameter, Special} else 1.0


def by_subclass(model: Any, _x: torch.Tensor) -> float:
    return 2.0 if issubclass(type(model.weight), nn.Parameter) else 1.0


def by_name(model: Any, x: torch.Tensor) -> float:
    return (2.0 if type(x).__name__ == "Tensor" else 1.0) * len(repr(type(model.weight)))


def by_dispatch(model: Any, x: torch.Tensor) -> float:
    return weight_of(x) * weight_of(model.weight) * weight_of(1)


def by_visitor(model: Any, x: torch.Tensor) -> float:
    return Visitor().visit(x) * Visitor().visit(model.weight)


def by_entry_of_a_row(_model: Any, x: torch.Tensor) -> float:
    return HANDLERS[type(x[torch.tensor(1)])]


def by_what_else_a_type_is(model: Any, _x: torch.Tensor) -> float:
    """Ask the name `type` itself, make a class and a metaclass by it."""

    class Meta(type):
        pass

    made = Meta("Made", (), {"weight": 2.0})
    found: list[bool] = [
        type(made) is Meta,
        isinstance(made, type),
        issubclass(Meta, type),
        isinstance(made, Meta) and not isinstance(int, Meta),
        type(Meta) is type,
        type("Other", (), {}).__name__ == "Other",
        {builtins.type: True}[type],
        type.__call__(dict) == {},
        type[int] == builtins.type[int],
        repr(type) == "<class 'type'>",
        type(type(model)) is type,
        not isinstance(model, type),
    ]
    return float(sum(found)) * made.weight  # type: ignore[attr-defined]


ASKED: list[Weight] = [
    by_entry, by_default, by_class, by_comparison, by_the_users_own_class, by_map, by_subclass,
    by_name, by_dispatch, by_visitor, by_entry_of_a_row, by_what_else_a_type_is,
]  # fmt: skip


def made() -> Any:
    torch.manual_seed(0)
    model: Any = nn.Linear(3, 2).double()
    model.special = Special(torch.ones(2, dtype=torch.float64))
    return model


@pytest.mark.parametrize("weight", ASKED, ids=lambda one: one.__name__)
def test_a_tensor_is_of_the_type_of_pytorch(weight: Weight) -> None:
    model, twin = made(), made()
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean() * weight(model, x)

    expected = twin(x).square().mean() * weight(twin, x)
    found = amp_ir.jit(step, model=model)(x)
    # Sums of six terms in another order.
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert "type" not in globals() and FakeTensor.__bases__ == (torch.Tensor,)
