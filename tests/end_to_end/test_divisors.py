# SPDX-License-Identifier: Apache-2.0
"""A step that divides an integer by 0 raises as eager PyTorch does, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.errors import AmpIrError, DivisionByZeroError

DIVISIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "//": lambda x, y: x // y,
    "%": lambda x, y: x % y,
    "fmod": torch.fmod,
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
}


def compiled(divide: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], given: torch.Tensor):  # type: ignore[no-untyped-def]
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x.float()) * divide(x, y).float()).sum()
        loss.backward()
        optimizer.step()
        return loss

    mod, _ = amp_ir.trace_step(
        step, (torch.ones_like(given), given), model=model, optimizer=optimizer
    )
    return model, amp_ir.compile(mod)


@pytest.mark.parametrize("name", DIVISIONS)
def test_a_divisor_of_the_batch(name: str) -> None:
    x, good = torch.tensor([[5, 7, 9]]), torch.tensor([[1, 2, 3]])
    model, train = compiled(DIVISIONS[name], good)
    train(x, good)
    before = model.weight.detach().clone()
    with pytest.raises(DivisionByZeroError, match="divides an integer by 0 in .*test_divisors"):
        train(x, torch.tensor([[1, 0, 3]]))
    assert torch.equal(model.weight, before)
    train(x, good)
    assert not torch.equal(model.weight, before)


def test_a_divisor_that_the_step_computes() -> None:
    good = torch.tensor([[1, 2, 3]])
    # From floats, which the host does not compute: the step finds it, and is rolled back.
    model, train = compiled(lambda x, y: x // (y.float() * 0.5).long().clamp(max=1), good)
    train(good, good + 2)
    before = model.weight.detach().clone()
    with pytest.raises(DivisionByZeroError, match="rolled back: nothing has changed"):
        train(good, good)
    assert torch.equal(model.weight, before)


def test_a_divisor_that_is_always_zero() -> None:
    good = torch.tensor([[1, 2, 3]])
    with pytest.raises(DivisionByZeroError, match="Nothing was run"):
        compiled(lambda x, y: x // 0, good)


def test_the_error_is_what_pytorchs_is() -> None:
    assert issubclass(DivisionByZeroError, AmpIrError)
    assert issubclass(DivisionByZeroError, ZeroDivisionError)
    assert issubclass(DivisionByZeroError, RuntimeError)
