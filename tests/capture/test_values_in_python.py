# SPDX-License-Identifier: Apache-2.0
"""Values that a step reads in Python: checks that raise, numbers that it returns, constants."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.capture import checked_reads
from amp_ir.errors import CaptureError, CheckFailedError

X, Y = torch.arange(32.0).reshape(8, 4).sin(), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
TIGHT: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}  # float32, sums of a few products


class Run:
    """A model, its optimizer, and a step around what a test gives."""

    def __init__(self, inside: Callable[..., Any]) -> None:
        torch.manual_seed(4)
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.inside = inside

    def step(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = nn.functional.cross_entropy(self.model(x), y)
        result = self.inside(self, loss, x, y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach() if result is None else result

    def jitted(self) -> Any:
        return amp_ir.jit(self.step, model=self.model, optimizer=self.optimizer)


def not_finite(_run: Run, loss: Any, _x: Any, _y: Any) -> None:
    if not torch.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss}")


def either(_run: Run, loss: Any, _x: Any, _y: Any) -> None:
    if loss.isnan() or loss.isinf():
        raise RuntimeError("the loss is not finite")


def last_of_and(_run: Run, _loss: Any, x: Any, _y: Any) -> None:
    if x is not None and x.abs().max() > 1e3:
        raise ValueError("too large")


def asserted(_run: Run, loss: Any, x: Any, _y: Any) -> None:
    assert (x.abs() < 1e3).all() and bool(torch.isfinite(loss)), "too large"


def compared_item(_run: Run, _loss: Any, x: Any, _y: Any) -> None:
    if x.abs().max().item() > 1e3:
        raise ValueError("too large")


def clipped(run: Run, loss: Any, _x: Any, _y: Any) -> None:
    grads = torch.autograd.grad(loss, list(run.model.parameters()), retain_graph=True)
    for parameter, grad in zip(run.model.parameters(), grads, strict=True):
        parameter.grad = grad
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.1, error_if_nonfinite=True)
    run.optimizer.zero_grad()


CHECKS = {
    not_finite: "raise FloatingPointError(f'the loss is {loss}')",
    either: "raise RuntimeError('the loss is not finite')",
    last_of_and: "raise ValueError('too large')",
    asserted: "assert (x.abs() < 1000.0).all() and bool(torch.isfinite(loss)), 'too large'",
    compared_item: "raise ValueError('too large')",
    clipped: "raise RuntimeError(f'The total norm of order {norm_type} for gradients from "
    "`parameters` is non-finite, so it cannot ...",
}


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_that_raises_stays_and_nothing_changes_where_it_fails(check: Any) -> None:
    ours, eager = Run(check), Run(check)
    train = ours.jitted()
    torch.testing.assert_close(train(X, Y), eager.step(X, Y), **TIGHT)
    before = [one.clone() for one in ours.model.parameters()]
    huge = X.clone()
    huge[0, 0] = math.inf
    with pytest.raises((RuntimeError, ValueError, ArithmeticError, AssertionError)):
        eager.step(huge, Y)
    with pytest.raises(CheckFailedError) as failed:
        train(huge, Y)
    assert str(failed.value).startswith(f"a check of the step failed: {CHECKS[check]} (test_values")
    assert str(failed.value).endswith("The step was rolled back: nothing has changed")
    for one, other in zip(ours.model.parameters(), before, strict=True):
        assert torch.equal(one, other)
    eager.optimizer.zero_grad()
    torch.testing.assert_close(train(X, Y), eager.step(X, Y), **TIGHT)
    assert train.recompiles == []


def negated(_run: Run, loss: Any, _x: Any, _y: Any) -> None:
    if not bool(torch.isfinite(loss)):
        raise FloatingPointError(f"the loss is {loss}")


def two_reads(_run: Run, loss: Any, x: Any, _y: Any) -> None:
    if bool(x.max() > 5) > bool(loss > 2):
        raise ValueError("large where the loss is small")


def several_reads(_run: Run, loss: Any, x: Any, _y: Any) -> None:
    if all(one > 5 for one in (loss, x.max())):
        raise ValueError("all large")


@pytest.mark.parametrize("check", [not_finite, negated, either, two_reads, several_reads])
def test_without_positions_of_bytecode_a_check_of_several_reads_is_refused(
    check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Python 3.10, and with -X no_debug_ranges."""
    monkeypatch.setattr(checked_reads, "_positions", lambda _code: None)
    train = Run(check).jitted()
    if check in (not_finite, negated):
        train(X, Y)
        with pytest.raises(CheckFailedError):
            train(X * torch.nan, Y)
        return
    with pytest.raises(CaptureError, match=r"check of tensors that raises \(if not torch.isfin"):
        train(X, Y)


def first_of_and(_run: Run, loss: Any, x: Any, _y: Any) -> None:
    if loss > 0 and x.abs().max() > 1e3:
        raise ValueError("too large")


def returns_early(_run: Run, loss: Any, _x: Any, _y: Any) -> Any:
    return loss.detach() * 0 if not torch.isfinite(loss) else None


def function_of_value(_run: Run, loss: Any, _x: Any, _y: Any) -> None:
    if math.floor(loss.item()) > 3:
        raise ValueError("too large")


def as_size(_run: Run, _loss: Any, x: Any, y: Any) -> None:
    x[: (y > 0).sum().item()]


@pytest.mark.parametrize("read", [first_of_and, returns_early, function_of_value, as_size])
def test_other_reads_of_values_are_refused(read: Any) -> None:
    with pytest.raises(CaptureError) as refused:
        Run(read).jitted()(X, Y)
    line = read.__code__.co_firstlineno + 1
    assert (
        f"test_values_in_python.py:{line}: a tensor's value is read in Python, by "
        ".item(), float(), int(), bool(), if or while. " in str(refused.value)
    )
    assert str(refused.value).endswith(
        "Keep it a tensor: return it and read it after the call, or choose with torch.where. A "
        "check of tensors that raises (if not torch.isfinite(loss): raise ...) stays; to skip a "
        "step whose gradients are not finite, use amp_ir.GradScaler"
    )


class Queue(nn.Module):
    """MoCo's, which is written at a place that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(3, 8))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def advance(self, n: int) -> None:
        self.at.add_(n).remainder_(self.queue.shape[1])

    def by_number(self, rows: torch.Tensor) -> None:
        at, n = int(self.at), len(rows)
        self.queue[:, at : at + n] = rows.T
        self.advance(n)

    def by_tensor(self, rows: torch.Tensor) -> None:
        queue, at, n = self.queue, self.at, len(rows)
        queue[:, (at + torch.arange(n)) % queue.shape[1]] = rows.T
        self.advance(n)


def test_a_place_that_is_read_is_told_how_to_stay_a_tensor() -> None:
    model, eager = Queue(), Queue()
    with pytest.raises(CaptureError) as refused:
        amp_ir.jit(model.by_number, model=model)(torch.ones(2, 3))
    assert (
        "which the step changes. A place may stay a tensor: x[k] for x[int(k)], and x[(k + "
        "torch.arange(n)) % len(x)] for n places from k on. Compute with x.item() itself"
        in str(refused.value)
    )
    train = amp_ir.jit(model.by_tensor, model=model)
    for index in range(5):
        rows = torch.full((2, 3), index + 1.0)
        train(rows)
        eager.by_number(rows)
    assert torch.equal(model.queue, eager.queue) and torch.equal(model.at, eager.at)


def test_what_the_hint_about_reads_says_works() -> None:
    def chosen(_run: Run, loss: Any, _x: Any, _y: Any) -> Any:
        return torch.where(torch.isfinite(loss), loss.detach(), 0.0)

    def after(_run: Run, loss: Any, _x: Any, y: Any) -> Any:
        return loss.detach(), (y > 0).sum()

    assert float(Run(chosen).jitted()(X, Y)) == pytest.approx(float(Run(chosen).step(X, Y)))
    loss, count = Run(after).jitted()(X, Y)
    assert f"{loss.item():.3f}" and range(count.item()) == range(5)

    run, scaler = Run(lambda *_: None), amp_ir.GradScaler()

    def skipping(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(run.model(x), y)
        scaler.scale(loss).backward()
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        return loss.detach()

    train = amp_ir.jit(skipping, model=run.model, optimizer=run.optimizer, scaler=scaler)
    before = run.model.weight.clone()
    train(X * math.inf, Y)
    assert train.skipped and torch.equal(run.model.weight, before)


def numbers(_run: Run, loss: Any, x: Any, y: Any) -> Any:
    right, count = (y > 0).sum().item(), x.shape[0]
    return {
        "loss": loss.item(), "sum": loss.item() * count, "share": right / count,
        "right": right, "wrong": count - right, "all": (y >= 0).all().item(),
        "mixed": [-right + 1, abs(-loss.item()), 2 / loss.item(), right * 0.5, 1 - loss.item()],
    }  # fmt: skip


def test_numbers_of_item_are_returned_as_numbers() -> None:
    ours, eager = Run(numbers), Run(numbers)
    train = ours.jitted()
    for shift in range(2):
        found, expected = train(X, (Y + shift) % 3), eager.step(X, (Y + shift) % 3)
        mixed = found.pop("mixed"), expected.pop("mixed")
        assert found == pytest.approx(expected, rel=1e-5)
        assert mixed[0] == pytest.approx(mixed[1], rel=1e-5)
        for key in ("loss", "sum", "share", "right", "wrong", "all"):
            assert type(found[key]) is type(expected[key])
        assert [type(one) for one in mixed[0]] == [type(one) for one in mixed[1]]


def test_a_number_of_item_scales_a_loss() -> None:
    def step(run: Run, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        count = (y > 0).sum().item()
        losses = nn.functional.cross_entropy(run.model(x), y, reduction="none")
        loss = losses.sum() / count + (count * y).to(losses.dtype).sum() * 0
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss.detach()

    ours, eager = Run(lambda *_: None), Run(lambda *_: None)
    train = amp_ir.jit(lambda x, y: step(ours, x, y), model=ours.model, optimizer=ours.optimizer)
    for y in (Y, (Y + 1) % 3):
        found = train(X, y)
        assert found.dtype is torch.float32
        torch.testing.assert_close(found, step(eager, X, y), **TIGHT)


def test_a_kept_number_is_refused() -> None:
    kept: list[Any] = []
    with pytest.raises(CaptureError, match="changes .*kept"):
        Run(lambda _run, loss, *_: kept.append(loss.item())).jitted()(X, Y)
    assert kept == []


def constants(_run: Run, loss: Any, x: Any, _y: Any) -> Any:
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    causal = torch.tril(torch.ones(4, 4))
    if mask.all() and (causal == 0).any().item():
        return loss.detach() * int(causal.sum())
    return None


def test_values_that_no_input_reaches_are_read() -> None:
    torch.testing.assert_close(Run(constants).jitted()(X, Y), Run(constants).step(X, Y), **TIGHT)


def random_mask(_run: Run, _loss: Any, x: Any, _y: Any) -> None:
    if (torch.rand(x.shape) > 2).any():
        x.sum()


def test_values_of_random_numbers_are_not_constants() -> None:
    with pytest.raises(CaptureError, match="a tensor's value is read in Python"):
        Run(random_mask).jitted()(X, Y)


def numbers_as_tensors(_run: Run, loss: Any, x: Any, y: Any) -> Any:
    """Make tensors of numbers that the step computes, and of ones that it is told."""
    size, count = x.sum().item(), (y > 0).sum().item()
    made = torch.tensor([size, 1.5, float(len(y))])
    counts = torch.tensor([[count, 2], [len(y), -count]])
    wide = torch.tensor(size, dtype=torch.float64)
    wide += 1
    either = torch.tensor([count, 0.5]), torch.as_tensor([(y > 0).any().item(), False])
    learned = torch.tensor([size, count], requires_grad=True)
    (slope,) = torch.autograd.grad(learned.prod(), learned)
    loss = loss + (made * torch.tensor([loss.detach(), size, 1.0])).sum()
    return loss.detach(), made, counts, wide, *either, slope, torch.tensor(count), size


def test_tensors_of_numbers_that_a_step_computes() -> None:
    run, eager = Run(numbers_as_tensors), Run(numbers_as_tensors)
    train = run.jitted()
    for k in range(3):
        found, expected = train(X + k, Y), eager.step(X + k, Y)
        torch.testing.assert_close(found, expected, **TIGHT)
        assert [getattr(one, "dtype", None) for one in found] == [
            getattr(one, "dtype", None) for one in expected
        ]
