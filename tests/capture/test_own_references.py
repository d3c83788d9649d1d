# SPDX-License-Identifier: Apache-2.0
"""Which parameter is which: `is`, `id()`, sets and dictionaries of parameters that users keep."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.errors import CaptureError

Keep = Callable[[nn.Module, torch.optim.Optimizer], Callable[[nn.Parameter], float]]


KEPT: dict[str, Keep] = {
    "a variable": lambda m, o: lambda p, w=None, k=m[0].weight: 0.5 if p is k else 1.0,
    "an attribute": lambda m, o: _attribute(SimpleNamespace(own=m[0].weight)),
    "a list": lambda m, o: _any_of(list(m[0].parameters())),
    "a tuple": lambda m, o: _any_of(tuple(m[0].parameters())),
    "a list in a dict": lambda m, o: _any_of({"own": [m[0].weight]}["own"]),
    "a set": lambda m, o: _in(set(m[0].parameters())),
    "a frozen set": lambda m, o: _in(frozenset(m[0].parameters())),
    "a dict": lambda m, o: _entry({p: 0.5 for p in m[0].parameters()}),
    "names": lambda m, o: _named({p: name for name, p in m.named_parameters()}),
    "ids": lambda m, o: _id_in({id(p) for p in m[0].parameters()}),
    "an id": lambda m, o: _id_in(SimpleNamespace(ids=[id(m[0].weight)]).ids),
    "ids with numbers": lambda m, o: _id_entry({id(p): 0.5 for p in m[0].parameters()}),
}


def _attribute(box: SimpleNamespace) -> Callable[[nn.Parameter], float]:
    return lambda p: 0.5 if p is box.own else 1.0


def _any_of(kept: Any) -> Callable[[nn.Parameter], float]:
    return lambda p: 0.5 if any(p is one for one in kept) else 1.0


def _in(kept: Any) -> Callable[[nn.Parameter], float]:
    return lambda p: 0.5 if p in kept else 1.0


def _entry(kept: dict[nn.Parameter, float]) -> Callable[[nn.Parameter], float]:
    return lambda p: kept.get(p, 1.0)


def _named(kept: dict[nn.Parameter, str]) -> Callable[[nn.Parameter], float]:
    return lambda p: 0.5 if kept[p].startswith("0.") else 1.0


def _id_in(kept: Any) -> Callable[[nn.Parameter], float]:
    return lambda p: 0.5 if id(p) in kept else 1.0


def _id_entry(kept: dict[int, float]) -> Callable[[nn.Parameter], float]:
    return lambda p: kept.get(id(p), 1.0)


class Chosen(torch.optim.Optimizer):
    """Keeps which parameters are stepped by half, by their ids, and a state of others' making."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.halved = {id(model[0].weight)}
        self.named = {"bias": [model[0].bias]}
        self.head = model[0].bias
        self.param_groups[0]["last"] = (model[2].bias,)

    @torch.no_grad()
    def note(self, gradients: Any) -> None:
        for parameter, gradient in gradients:
            self.state[parameter].setdefault("sum", torch.zeros_like(parameter)).add_(gradient)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                factor = 0.5 if id(p) in self.halved or p is self.head else 1.0
                factor *= 3.0 if any(p is one for one in self.named["bias"]) else 1.0
                factor *= 5.0 if p is group["last"][0] else 1.0
                p.sub_(group["lr"] * factor * (p.grad + self.state[p]["sum"]))


def trained(keep: Keep | None, *, is_ours: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    parameters = list(model.parameters())
    optimizer: Any = (
        Chosen(model) if keep is None else torch.optim.SGD(parameters, 0.1, momentum=0.9)
    )
    factor = None if keep is None else keep(model, optimizer)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        if factor is None:
            optimizer.note([(p, p.grad) for p in parameters])
        else:
            for p in model.parameters():
                p.grad.mul_(factor(p))
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    train = amp_ir.jit(step, model=model, optimizer=optimizer) if is_ours else step
    losses = [train(torch.ones(2, 3)) for _ in range(3)]
    return [*losses, *(one.detach() for one in parameters)]


@pytest.mark.parametrize("name", [*KEPT, "an optimizer"])
def test_own_references_are_to_the_parameters_of_the_model(name: str) -> None:
    keep = KEPT.get(name)
    torch.testing.assert_close(trained(keep, is_ours=True), trained(keep, is_ours=False))


def test_what_the_user_keeps_is_as_before_a_capture() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    weight = model[0].weight
    box = SimpleNamespace(one=weight, pair=(weight, 1), number=id(weight))
    kept: list[Any] = [weight, {weight: 1.0, "b": id(weight)}, {weight}, box]
    before = [weight, {weight: 1.0, "b": id(weight)}, {weight}, dict(vars(box))]

    def step(x: torch.Tensor) -> torch.Tensor:
        is_first = kept[0] is box.one and box.one in kept[1] and box.pair[0] in kept[2]
        assert is_first and box.number == kept[1]["b"] == id(model[0].weight)
        return model(x).detach()

    amp_ir.jit(step, model=model)(torch.ones(2, 3))
    assert kept[:3] + [vars(box)] == before
    assert kept[0] is weight and box.pair[0] is weight and box.one is weight


EARLY = {
    "an entry": lambda o, p: "momentum_buffer" in o.state[p],
    "get": lambda o, p: bool(o.state.get(p)),
    "membership": lambda o, p: p in o.state,
    "emptiness": lambda o, p: bool(o.state),
    "values": lambda o, p: bool(list(o.state.values())),
    "what would be saved": lambda o, p: bool(o.state_dict()["state"]),
}


def looking(name: str, *, is_after: bool) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = layer(x).square().mean()
        loss.backward()
        if not is_after and EARLY[name](optimizer, layer.weight):
            layer.weight.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach() * (2.0 if EARLY[name](optimizer, layer.weight) else 1.0)

    return layer, optimizer, step


@pytest.mark.parametrize("name", EARLY)
def test_state_that_is_made_ahead_is_not_looked_at(name: str) -> None:
    """PyTorch's optimizers make it in their first step, where the branch goes the other way."""
    layer, optimizer, step = looking(name, is_after=False)
    with pytest.raises(CaptureError) as caught:
        amp_ir.jit(step, model=layer, optimizer=optimizer)(torch.ones(2, 3))
    assert str(caught.value).partition(".py:")[2].partition(": ")[2] == (
        "looks at the state of SGD before its first step, which makes it in PyTorch; a compiled "
        "step has it before. Look after optimizer.step(), or take the first step in PyTorch, "
        "uncompiled"
    )
    step(torch.ones(2, 3))  # what the advice says
    other = looking(name, is_after=False)
    other[2](torch.ones(2, 3))
    train = amp_ir.jit(step, model=layer, optimizer=optimizer)
    for _ in range(2):
        torch.testing.assert_close(train(torch.ones(2, 3)), other[2](torch.ones(2, 3)))


@pytest.mark.parametrize("name", EARLY)
def test_state_is_looked_at_after_the_step(name: str) -> None:
    layer, optimizer, step = looking(name, is_after=True)
    other = looking(name, is_after=True)
    train = amp_ir.jit(step, model=layer, optimizer=optimizer)
    for _ in range(3):
        torch.testing.assert_close(train(torch.ones(2, 3)), other[2](torch.ones(2, 3)))
