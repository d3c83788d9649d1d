# SPDX-License-Identifier: Apache-2.0
"""Containers of the standard library beside list, dict and set are guarded as they are."""

from __future__ import annotations

import array
import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.errors import CaptureError
from step_comparison import normal


def training(
    factor: Callable[[], Any],
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[torch.Tensor], torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean() * factor()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


# (the container, what the step reads of it, what changes it before call k)
CHANGED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any, int], Any]]] = {
    "items_of_a_deque": (
        lambda: collections.deque([1.0, 2.0], maxlen=2),
        lambda held: held[0] + sum(held),
        lambda held, k: held.append(3.0 + k),
    ),
    "length_of_a_deque": (lambda: collections.deque([1.0]), len, lambda held, k: held.append(k)),
    "tensors_in_a_deque": (
        lambda: collections.deque([torch.ones(3)], maxlen=1),
        lambda held: held[0].sum(),
        lambda held, k: held.append(torch.full((3,), 2.0 + k)),
    ),
    "a_user_dict": (
        lambda: collections.UserDict(scale=1.0),
        lambda held: held["scale"],
        lambda held, k: held.update(scale=2.0 + k),
    ),
    "the_dict_of_a_user_dict": (
        lambda: collections.UserDict(scale=1.0),
        lambda held: held["scale"],
        lambda held, k: setattr(held, "data", {"scale": 2.0 + k}),
    ),
    "a_user_list": (lambda: collections.UserList([1.0]), sum, lambda held, k: held.append(k)),
    "an_array": (
        lambda: array.array("d", [1.0, 2.0]),
        lambda held: held[1],
        lambda held, k: held.__setitem__(1, 3.0 + k),
    ),
    "bytes": (
        lambda: bytearray([1, 2]),
        lambda held: held[1],
        lambda held, k: held.__setitem__(1, 3 + k),
    ),
    "a_memoryview": (
        lambda: memoryview(bytearray([1, 2])),
        lambda held: held[1],
        lambda held, k: held.__setitem__(1, 3 + k),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_a_change_between_calls_is_followed(name: str) -> None:
    make, read, change = CHANGED[name]
    held, others = make(), make()
    model, optimizer, step = training(lambda: read(held))
    eager_model, _, eager = training(lambda: read(others))
    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    for k in range(4):
        x = normal(k, 5, 6)
        torch.testing.assert_close(train(x), eager(x))
        change(held, k)
        change(others, k)
    torch.testing.assert_close(model.weight, eager_model.weight)


KEPT: dict[str, tuple[Any, Callable[[Any, torch.Tensor], Any], str]] = {
    "a_number": (
        collections.deque([1, 2]), lambda held, _loss: held.append(1), "(a deque, at 2)",
    ),
    "a_turn": (
        collections.deque([1, 2]), lambda held, _loss: held.rotate(), "which was 1 and becomes 2",
    ),
    "a_tensor": (
        collections.deque([1]), lambda held, loss: held.append(loss), "keeps a tensor",
    ),
    "a_byte": (bytearray([1]), lambda held, _loss: held.append(1), "(a bytearray, at 1)"),
    "a_float": (
        array.array("d", [1.0]), lambda held, _loss: held.append(1.0), "(a array, at 1)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_what_the_step_leaves_in_one_is_refused(name: str) -> None:
    held, leave, message = KEPT[name]
    before = list(held)
    model = nn.Linear(6, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        leave(held, loss.detach())
        return loss.detach()

    with pytest.raises(CaptureError) as caught:
        amp_ir.jit(step, model=model)(normal(0, 5, 6))
    assert message in str(caught.value)
    assert list(held) == before
