# SPDX-License-Identifier: Apache-2.0
"""Attributes that are not there when a step is captured, and values that few programs hold."""

from __future__ import annotations

import collections
import contextlib
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.errors import CaptureError

X = torch.linspace(-1, 1, 6).view(2, 3)
Read = Callable[[], float]
Case = tuple[Read, Callable[[], Any], str]


class Defaults:
    """Settings of which those that were not given are 2."""

    def __getattr__(self, name: str) -> float:
        return 2.0


def caught() -> Case:
    box = SimpleNamespace()

    def read() -> float:
        try:
            return box.scale
        except AttributeError:
            return 2.0

    return read, lambda: setattr(box, "scale", 5.0), "attribute 'scale' of {box} was absent and "


def suppressed() -> Case:
    box = SimpleNamespace()

    def read() -> float:
        with contextlib.suppress(AttributeError):
            return box.scale
        return 2.0

    return read, lambda: setattr(box, "scale", 5.0), "attribute 'scale' of {box} was absent and "


def by_getattr_of_the_class() -> Case:
    box = Defaults()
    change = lambda: setattr(box, "scale", 5.0)  # noqa: E731
    return lambda: box.scale, change, "attribute 'scale' of {box} was absent and is 5.0"


def of_a_tensor() -> Case:
    """The step computes nothing with the tensor itself."""
    box = torch.ones(2)
    box.scale = 2.0
    change = lambda: setattr(box, "scale", 5.0)  # noqa: E731
    return lambda: box.scale, change, "attribute 'scale' of {box} was 2.0 and is 5.0"


def in_a_chain() -> Case:
    box = collections.ChainMap({}, {"scale": 2.0})
    change = lambda: operator.setitem(box, "scale", 5.0)  # noqa: E731
    return lambda: box["scale"], change, "item 0 of attribute 'maps' of {box} has other keys"


def in_made_globals() -> Case:
    names: dict[str, Any] = {"SCALE": 2.0}
    exec("def box(): return SCALE", names)
    box = names["box"]
    change = lambda: operator.setitem(names, "SCALE", 5.0)  # noqa: E731
    return lambda: box(), change, "global 'SCALE' (<string>) was 2.0 and is 5.0"


CASES = [caught, suppressed, by_getattr_of_the_class, of_a_tensor, in_a_chain, in_made_globals]


def step_of(read: Callable[[], Any]) -> tuple[Callable[[torch.Tensor], Any], Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)

    def step(x: torch.Tensor) -> torch.Tensor:
        return (model(x) * read()).detach()

    return step, amp_ir.jit(step, model=model)


@pytest.mark.parametrize("make", CASES)
def test_a_change_compiles_again(make: Callable[[], Case]) -> None:
    read, change, reason = make()
    step, train = step_of(read)
    torch.testing.assert_close(train(X), step(X))
    change()
    torch.testing.assert_close(train(X), step(X))
    (one,) = train.recompiles
    assert one.reason.startswith(reason.split("{box}")[0])
    assert reason.split("{box}")[-1] in one.reason


@pytest.mark.parametrize("value", [None, True, "none"])
def test_a_number_that_is_an_input_becomes_something_else(value: Any) -> None:
    box = SimpleNamespace(limit=1.0)

    def read() -> float:
        limit = box.limit
        # A comparison with the number, and a branch without one.
        return (limit or 7.0) if not isinstance(limit, str) else 3.0

    step, train = step_of(read)
    for one in (1.0, 2.0, 3.0, value, 4.0, value):
        box.limit = one
        torch.testing.assert_close(train(X), step(X))


def counts(tensor: Any, _items: list[Any]) -> None:
    tensor.calls += 1


def adds(_tensor: Any, items: list[Any]) -> None:
    operator.iadd(items, [1])


def replaces(_tensor: Any, items: list[Any]) -> None:
    items[0] = 3
    items.append(1)


@pytest.mark.parametrize("act", [counts, adds, replaces])
def test_a_refused_change_is_undone(act: Callable[[Any, list[Any]], None]) -> None:
    tensor, items = torch.ones(2), [None, 2]
    tensor.calls = 0

    def read() -> float:
        act(tensor, items)
        return float(len(items))

    _, train = step_of(read)
    with pytest.raises(CaptureError, match="A compiled step changes tensors only"):
        train(X)
    assert (tensor.calls, items) == (0, [None, 2])
