# SPDX-License-Identifier: Apache-2.0
"""The modes, train or eval, in which a step leaves modules: a compiled step leaves them too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from square_steps import square_step

TEACHER = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))


def sets_train(model: nn.Module, update: Callable[[Any], Any]) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        model.train()
        return update(x)

    return step


def ends_in_eval(model: nn.Module, update: Callable[[Any], Any]) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        model.train()
        loss = update(x)
        model.eval()
        return loss

    return step


def reads_it_first(model: nn.Module, update: Callable[[Any], Any]) -> Any:
    """The second call trains in eval mode, in PyTorch too."""

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = update(x)
        model.eval()
        return loss

    return step


def sets_one_layer(model: nn.Module, update: Callable[[Any], Any]) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        model[1].eval()
        return update(x)

    return step


def toggles(model: nn.Module, update: Callable[[Any], Any]) -> Any:
    """Each call computes in the mode that the one before has left."""

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = update(x)
        model.train(mode=not model.training)
        return loss

    return step


class Dropping(nn.Module):
    """Reads its mode in Python, as in `F.dropout(x, p, training=self.training)`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * (2.0 if self.training else 1.0)


def training(
    kind: Any, last: Callable[[], nn.Module] = lambda: nn.Linear(4, 2)
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    # BatchNorm computes other numbers in eval mode.
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), last())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    return model, optimizer, kind(model, square_step(model, optimizer))


def modes(model: nn.Module) -> list[bool]:
    return [one.training for one in model.modules()]


@pytest.mark.parametrize("last", [lambda: nn.Linear(4, 2), Dropping], ids=["unread", "read"])
@pytest.mark.parametrize("begins_in_eval", [False, True])
@pytest.mark.parametrize(
    ("kind", "programs"),
    # Where a model begins in train mode, and in eval mode.
    [
        (sets_train, (2, 1)),
        (ends_in_eval, (1, 2)),
        (reads_it_first, (2, 2)),
        (sets_one_layer, (2, 2)),
        (toggles, (2, 2)),
    ],
)
def test_modes_are_left_as_in_eager(
    kind: Any, programs: tuple[int, int], begins_in_eval: bool, last: Callable[[], nn.Module]
) -> None:
    ours, optimizer, step = training(kind, last)
    theirs, _, eager = training(kind, last)
    train = amp_ir.jit(step, model=ours, optimizer=optimizer)
    for model in (ours, theirs):
        model.train(not begins_in_eval)
    for k in range(7):
        if k == 3:
            for model in (ours, theirs):
                model.eval()
        if k == 5:
            for model in (ours, theirs):
                model.train()
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(k))
        # Eight rows in float32, summed in another order.
        torch.testing.assert_close(train(x), eager(x), msg=f"call {k}")
        assert modes(ours) == modes(theirs), k
    # A mode that is read in Python is a guard.
    assert len(train.recompiles) + 1 <= (programs[begins_in_eval] if last is not Dropping else 2)


def test_a_model_in_eval_mode_whose_step_sets_train_is_one_program() -> None:
    """As Transformers' models come from `from_pretrained`."""
    model, optimizer, step = training(sets_train)
    model.eval()
    mod, _ = amp_ir.trace_step(step, (torch.randn(8, 4),), model=model, optimizer=optimizer)
    assert modes(model) == [False] * 4
    compiled = amp_ir.compile(mod)
    for _ in range(2):
        compiled(torch.randn(8, 4))
        assert modes(model) == [True] * 4
    model.eval()
    compiled(torch.randn(8, 4))
    assert modes(model) == [True] * 4


def test_the_mode_of_a_model_that_was_not_passed() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        TEACHER.eval()
        with torch.no_grad():
            wanted = TEACHER(x)
        optimizer.zero_grad()
        loss = (model(x) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    for _ in range(3):
        TEACHER.train()
        train(torch.randn(8, 4))
        assert modes(TEACHER) == [False] * 3
    assert not train.recompiles
