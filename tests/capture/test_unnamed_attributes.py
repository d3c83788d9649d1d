# SPDX-License-Identifier: Apache-2.0
"""Attributes that a step stores under computed names are kept or refused as named ones."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.errors import CaptureError


class Memory(nn.Module):
    """Keeps what it computed last in attributes, one a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(3, 3)
        for k in range(2):
            setattr(self, f"memory{k}", torch.zeros(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.project(x)
        for k in range(2):
            h = h + 0.5 * getattr(self, f"memory{k}")
            setattr(self, f"memory{k}", h.detach())
        return h


class Buffers(Memory):
    """The same in buffers, which the step writes."""

    def __init__(self) -> None:
        super().__init__()
        for k in range(2):
            delattr(self, f"memory{k}")
            self.register_buffer(f"memory{k}", torch.zeros(2, 3))


class Kept:
    """An object of the user's."""

    def __init__(self) -> None:
        self.rounds = 0


Store = Callable[[Any, torch.Tensor], Any]
STORES: dict[str, Store] = {
    "setattr": lambda kept, h: setattr(kept, "row" + str(0), h),
    "vars": lambda kept, h: vars(kept).update({"row" + str(0): h}),
    "__dict__": lambda kept, h: kept.__dict__.__setitem__("row" + str(0), h),
    "__setattr__": lambda kept, h: object.__setattr__(kept, "row" + str(0), h),
    "in a list": lambda kept, h: setattr(kept, "row" + str(0), [h]),
}


def training(model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return optimizer, step


@pytest.mark.parametrize("kind", [Memory, Buffers])
def test_memory_in_attributes_is_followed(kind: type[Memory]) -> None:
    def made() -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        model = kind()
        return model, *training(model)

    (model, optimizer, step), (other, _, eager) = made(), made()
    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    for k in range(4):
        x = torch.full((2, 3), float(k + 1))
        torch.testing.assert_close(train(x), eager(x))
    for k in range(2):
        name = f"memory{k}"
        torch.testing.assert_close(getattr(model, name), getattr(other, name))


@pytest.mark.parametrize("kept", [Kept, types.SimpleNamespace], ids=["object", "namespace"])
@pytest.mark.parametrize("store", STORES)
def test_a_tensor_in_an_object_is_kept(store: str, kept: Callable[[], Any]) -> None:
    model, owner = nn.Linear(3, 3), kept()
    put = STORES[store]

    def step(x: torch.Tensor) -> torch.Tensor:
        h = model(x)
        put(owner, h.detach())
        return h.mean()

    train = amp_ir.jit(step, model=model)
    for k in range(3):
        x = torch.full((2, 3), float(k))
        train(x)
        held = owner.row0[0] if isinstance(owner.row0, list) else owner.row0
        torch.testing.assert_close(held, model(x).detach())


def test_a_count_under_a_computed_name_is_refused() -> None:
    model, owner, name = nn.Linear(3, 3), Kept(), "".join(["ro", "unds"])

    def step(x: torch.Tensor) -> torch.Tensor:
        setattr(owner, name, getattr(owner, name) + 1)
        return model(x).mean()

    with pytest.raises(CaptureError, match="was 0 and becomes 1"):
        amp_ir.jit(step, model=model)(torch.ones(2, 3))
    assert owner.rounds == 0


def test_what_it_stores_alike_in_each_call_stays_compiled() -> None:
    model, owner = nn.Linear(3, 3), Kept()

    def step(x: torch.Tensor) -> torch.Tensor:
        setattr(owner, "shape" + str(0), tuple(x.shape))
        return model(x).mean()

    train = amp_ir.jit(step, model=model)
    x = torch.ones(2, 3)
    for _ in range(3):
        torch.testing.assert_close(train(x), model(x).mean())
    assert owner.shape0 == (2, 3)
