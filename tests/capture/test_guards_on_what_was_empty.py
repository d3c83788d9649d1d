# SPDX-License-Identifier: Apache-2.0
"""Tables of modules that fill, functions of libraries under other names, `vars`, metaclasses."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir

X = torch.linspace(-1, 1, 6).view(2, 3)
Read = Callable[[torch.Tensor], Any]
# What the step computes of a tensor, what changes it, and the reason of the second compile.
Case = tuple[Read, Callable[[], Any], str]
ACTIVATION = torch.tanh
SCALE = 2.0


class Bare(nn.Module):
    """A module that holds nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for buffer in self.buffers():
            x = x + buffer
        return x + len(list(self.modules())) + sum(p.sum() for p in self.parameters())


def a_first_buffer() -> Case:
    module = Bare()
    change = lambda: module.register_buffer("k", torch.ones(3))  # noqa: E731
    return module, change, "has other submodules or parameters"


def a_first_parameter() -> Case:
    module = Bare()
    made = nn.Parameter(torch.ones(3), requires_grad=False)
    change = lambda: module.register_parameter("k", made)  # noqa: E731
    return module, change, "has other submodules or parameters"


def a_first_submodule() -> Case:
    module = Bare()
    return module, lambda: module.add_module("k", nn.Tanh()), "has other submodules or parameters"


def a_global_function_of_torch() -> Case:
    def change() -> None:
        globals()["ACTIVATION"] = torch.sin

    return lambda x: ACTIVATION(x), change, "global 'ACTIVATION'"


def an_attribute_that_is_a_function_of_torch() -> Case:
    box = Box()
    box.act, box.kind = torch.tanh, nn.Tanh
    change = lambda: setattr(box, "act", torch.sin)  # noqa: E731
    return lambda x: box.act(box.kind()(x)), change, "attribute 'act' of closure variable 'box'"


def an_attribute_that_is_a_class_of_torch() -> Case:
    box = Box()
    box.kind = nn.Tanh
    change = lambda: setattr(box, "kind", nn.ReLU)  # noqa: E731
    return lambda x: box.kind()(x), change, "attribute 'kind' of closure variable 'box'"


def an_entry_of_vars() -> Case:
    box = Box()
    box.scale = 2.0
    change = lambda: setattr(box, "scale", 5.0)  # noqa: E731
    return lambda x: x * vars(box)["scale"], change, "attribute 'scale' of closure variable 'box'"


def an_entry_of_a_dict_that_was_absent() -> Case:
    box = Box()
    change = lambda: setattr(box, "scale", 5.0)  # noqa: E731
    reason = "attribute 'scale' of closure variable 'box'"
    return lambda x: x * box.__dict__.get("scale", 2.0), change, reason


def all_of_vars() -> Case:
    box = argparse.Namespace(one=2.0)
    change = lambda: setattr(box, "two", 5.0)  # noqa: E731
    reason = "the attributes of closure variable 'box' of "
    return lambda x: x * sum(vars(box).values()), change, reason


def an_entry_of_globals() -> Case:
    def change() -> None:
        globals()["SCALE"] = 5.0

    return lambda x: x * globals()["SCALE"], change, "global 'SCALE'"


def an_attribute_of_a_metaclass() -> Case:
    class Meta(type):
        scale = 2.0

    class Scaled(metaclass=Meta):
        pass

    change = lambda: setattr(Meta, "scale", 5.0)  # noqa: E731
    return lambda x: x * Scaled.scale, change, "attribute 'scale' of class Meta"


class Box:
    """An object with the attributes that it is given."""

    act: Any
    kind: Any
    scale: float


CASES = [
    a_first_buffer, a_first_parameter, a_first_submodule, a_global_function_of_torch,
    an_attribute_that_is_a_function_of_torch, an_attribute_that_is_a_class_of_torch,
    an_entry_of_vars, an_entry_of_a_dict_that_was_absent, all_of_vars, an_entry_of_globals,
    an_attribute_of_a_metaclass,
]  # fmt: skip


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_a_change_compiles_again(make: Callable[[], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACTIVATION", "SCALE"):  # put back after the test
        monkeypatch.setitem(globals(), name, globals()[name])
    read, change, reason = make()
    model = nn.Linear(3, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        return read(model(x)).detach()

    train = amp_ir.jit(step, model=model)
    for _ in range(2):
        torch.testing.assert_close(train(X), step(X))
    before = step(X)
    change()
    torch.testing.assert_close(train(X), step(X))
    assert not torch.equal(step(X), before)
    (one,) = train.recompiles
    assert re.search(re.escape(reason), one.reason), one.reason


class Lazy:
    """What is computed once of an attribute, in a function that later calls do not enter."""

    scale = 2.0
    kept: float | None = None

    @functools.cached_property
    def double(self) -> float:
        return 2 * self.scale

    def triple(self) -> float:
        return 3 * self.scale


def test_a_value_that_the_user_takes_away_is_computed_anew() -> None:
    model, box = nn.Linear(3, 3), Lazy()
    box.scale = 2.0

    def step(x: torch.Tensor) -> torch.Tensor:
        if box.kept is None:
            box.kept = box.triple()
        return model(x).detach() * box.double + box.kept

    train = amp_ir.jit(step, model=model)
    train(X)
    assert (box.double, box.kept) == (4.0, 6.0)
    box.scale = 5.0
    train(X)  # as in PyTorch, what is kept stays
    assert (box.double, box.kept) == (4.0, 6.0)
    del box.double, box.kept
    found = train(X)
    assert vars(box) == {"scale": 5.0, "double": 10.0, "kept": 15.0}
    torch.testing.assert_close(found, step(X))
    assert len(train.recompiles) == 1
    del box.double, box.kept  # of what was read nothing has changed: the program is the same
    train(X)
    assert (box.double, box.kept) == (10.0, 15.0)
    assert len(train.recompiles) == 1
