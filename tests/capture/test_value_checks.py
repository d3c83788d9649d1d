# SPDX-License-Identifier: Apache-2.0
"""Values that PyTorch's kernels refuse end a call of the compiled step; nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir
from amp_ir.errors import CheckFailedError

SHARES = torch.tensor([[0.0, 0.25, 1.0]])
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@attrs.frozen
class Case:
    """A loss of a model's results and a batch; batches that PyTorch takes, and refuses."""

    loss: Loss
    right: torch.Tensor
    wrong: tuple[torch.Tensor, ...]
    message: str


def _other(value: float) -> torch.Tensor:
    """Return a batch whose last element is another."""
    return torch.cat([SHARES[:, :2], torch.tensor([[value]])], 1)


CASES: dict[str, Case] = {
    "target of binary_cross_entropy": Case(
        lambda y, b: F.binary_cross_entropy(y.sigmoid(), b),
        SHARES,
        (_other(1.5), _other(-0.5), _other(torch.nan)),
        "all elements of target should be between 0 and 1",
    ),
    "input of binary_cross_entropy": Case(
        lambda y, b: F.binary_cross_entropy(b + 0 * y.detach(), SHARES) + y.sum(),
        SHARES,
        (_other(1.5), _other(torch.nan)),
        "all elements of input should be between 0 and 1",
    ),
    "a loss whose prediction is NaN": Case(
        lambda y, b: F.binary_cross_entropy((y * b).sigmoid(), SHARES),
        SHARES,
        (_other(torch.nan),),
        "all elements of input should be between 0 and 1",
    ),
    "bernoulli": Case(
        lambda y, b: (y * torch.bernoulli(b)).sum(),
        SHARES,
        (_other(1.5), _other(torch.nan)),
        "all probabilities should be between 0 and 1",
    ),
    "normal": Case(
        lambda y, b: (y * torch.normal(y.detach(), b)).sum(),
        SHARES,
        (_other(-1.0),),
        "all elements of std should be at least 0",
    ),
    "normal around a number": Case(
        lambda y, b: (y * torch.normal(0.5, b)).sum(),
        SHARES,
        (_other(-1.0),),
        "all elements of std should be at least 0",
    ),
    "multinomial": Case(
        lambda y, b: y.gather(1, torch.multinomial(b, 1)).sum(),
        SHARES,
        (_other(-1.0), _other(torch.nan), _other(torch.inf), torch.zeros(1, 3)),
        "all weights of multinomial should be finite",
    ),
    "gaussian_nll_loss": Case(
        lambda y, b: F.gaussian_nll_loss(y, SHARES, b),
        SHARES,
        (_other(-1.0),),
        "var has negative",
    ),
    "an assertion": Case(
        lambda y, b: torch._assert_async((b >= 0).all(), "no share") or y.sum(),
        SHARES,
        (_other(-1.0),),
        "no share, in",
    ),
    "an assertion without words": Case(
        lambda y, b: torch._assert_async(b.sum()) or y.sum(),
        SHARES,
        (torch.zeros(1, 3),),
        "Expected Tensor with single nonzero value, in",
    ),
}


def step_of(loss: Loss) -> tuple[nn.Linear, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> torch.Tensor:
        result = loss(model(torch.ones(1, 3)), batch)
        result.backward()
        optimizer.step()
        optimizer.zero_grad()
        return result.detach()

    return model, amp_ir.jit(step, model=model, optimizer=optimizer)


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_value_changes_nothing(name: str) -> None:
    case = CASES[name]
    model, train = step_of(case.loss)
    train(case.right)
    before = [one.detach().clone() for one in model.parameters()]
    for wrong in case.wrong:
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever PyTorch says
            case.loss(torch.ones(1, 3), wrong)
        with pytest.raises(CheckFailedError, match=case.message):
            train(wrong)
    for now, one in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(now.detach(), one, rtol=0, atol=0)
    train(case.right)
    assert not train.recompiles
    assert not torch.equal(model.weight, before[0])


def test_a_negative_number_as_variance_is_refused_at_once() -> None:
    _, train = step_of(lambda y, b: F.gaussian_nll_loss(y, b, -1.0))
    with pytest.raises(amp_ir.errors.CaptureError, match="var has negative"):
        train(SHARES)


def test_values_from_outside_are_checked_without_compiling_again() -> None:
    target = SHARES.clone()
    _, train = step_of(lambda y, b: F.binary_cross_entropy(y.sigmoid() * b.sum() / b.sum(), target))
    train(SHARES)
    target[0, 0] = 0.5
    train(SHARES)
    target[0, 0] = 2.0
    with pytest.raises(CheckFailedError, match="elements of target"):
        train(SHARES)
    assert not train.recompiles


def test_numbers_that_a_step_returns_beside_a_check_are_its_own() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def step(b: torch.Tensor) -> tuple[torch.Tensor, float, float]:
        loss = F.binary_cross_entropy(model(b).sigmoid(), b)
        return loss, loss.item(), 2 * optimizer.param_groups[0]["lr"]

    train = amp_ir.jit(step, model=model, optimizer=optimizer, amp_dtype=None)
    for rate in (0.5, 0.25):
        optimizer.param_groups[0]["lr"] = rate
        loss, number, twice = train(SHARES)
        assert (number, twice) == (loss.item(), 2 * rate)
    assert not train.recompiles


def test_what_cannot_be_wrong_is_not_checked_so_that_its_loop_stays_one() -> None:
    def chain(y: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            b = torch.bernoulli(torch.sigmoid(y.detach() + b))
        return (y * b).sum()

    _, train = step_of(chain)
    train(SHARES)
    assert "19 steps of" in train.ir("amp")


def test_losses_of_each_row_by_vmap() -> None:
    def each(y: torch.Tensor, b: torch.Tensor) -> Any:
        by_row = torch.func.vmap(lambda p, t: F.binary_cross_entropy(p, t))
        spread = torch.func.vmap(lambda p, t: F.gaussian_nll_loss(p, t, t + 0.5))
        return by_row(y.sigmoid(), b).sum() + spread(y, b).sum()

    _, train = step_of(each)
    train(SHARES)
    with pytest.raises(CheckFailedError, match="elements of target"):
        train(_other(1.5))
    with pytest.raises(CheckFailedError, match="var has negative"):
        train(_other(-1.0))
