# SPDX-License-Identifier: Apache-2.0
"""Python numbers among the arguments that change from call to call; plain PyTorch is the reference.

A number that has changed twice is read at each call; one that decides a size or a branch is not.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir
from amp_ir import errors

# float32, 8 elements a sum and a few steps: a few roundings of 2^-24 each.
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
# bfloat16 has 8 significant bits: a few roundings of 2^-9 each.
CLOSE_LOW = {"rtol": 2**-5, "atol": 2**-7}

Loss = Callable[..., torch.Tensor]


@attrs.frozen
class Pair:
    """The same training twice: jitted, and plain."""

    train: Any
    step: Any
    ours: nn.Module
    eager: nn.Module

    @classmethod
    def of(cls, loss_of: Loss, **options: Any) -> Pair:
        torch.manual_seed(0)
        ours = nn.Linear(6, 3)
        eager = copy.deepcopy(ours)
        (mine, optimizer), (step, _) = _training(ours, loss_of), _training(eager, loss_of)
        train = amp_ir.jit(mine, model=ours, optimizer=optimizer, **options)
        return cls(train, step, ours, eager)

    def call(self, *numbers: Any, seed: int = 0, rows: int = 5, **close: float) -> Any:
        close = close or CLOSE
        x, y = batch(seed, rows)
        expected, result = self.step(x, y, *numbers), self.train(x, y, *numbers)
        torch.testing.assert_close(result, expected, **close)
        state, expected = self.ours.state_dict(), self.eager.state_dict()
        torch.testing.assert_close(dict(state), dict(expected), **close)
        return result

    @property
    def reasons(self) -> list[str]:
        return [one.reason for one in self.train.recompiles]


def _training(model: nn.Module, loss_of: Loss) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor, *numbers: Any) -> Any:
        loss = loss_of(model(x), y, *numbers)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, optimizer


def batch(seed: int, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=generator)
    return x, torch.randint(0, 3, (rows,), generator=generator)


def tempered(z: torch.Tensor, y: torch.Tensor, temperature: float) -> torch.Tensor:
    return F.cross_entropy(z / temperature, y)


def nested(z: torch.Tensor, y: torch.Tensor, given: Any) -> torch.Tensor:
    weight, (power, _name) = given["weight"], given["rest"]
    return F.cross_entropy(z, y) * weight + z.square().mean() * math.exp(-power)


def distilled(z: torch.Tensor, y: torch.Tensor, temperature: float) -> torch.Tensor:
    teacher = F.one_hot(y, 3).float().softmax(-1)  # `xlogy` of it has NaN as a constant
    return F.kl_div((z / temperature).log_softmax(-1), teacher, reduction="batchmean")


def two(z: torch.Tensor, y: torch.Tensor, temperature: float, weight: float) -> torch.Tensor:
    return F.cross_entropy(z / temperature, y) + weight * z.square().mean()


def counted(z: torch.Tensor, y: torch.Tensor, count: int) -> torch.Tensor:
    return F.cross_entropy(z, y) * (1.0 - 0.9**count) + z.abs().mean() / (count + 1)


def warmed_up(z: torch.Tensor, y: torch.Tensor, count: int) -> torch.Tensor:
    return F.cross_entropy(z, y) * min(1.0, (count + 1) / 5)


PROGRAMS: dict[str, tuple[Loss, Callable[[int], tuple[Any, ...]]]] = {
    "temperature": (tempered, lambda i: (0.7 + 0.3 * i,)),
    "distilled": (distilled, lambda i: (0.7 + 0.3 * i,)),
    "nested": (nested, lambda i: ({"weight": 1.5 - 0.2 * i, "rest": (0.1 * i, "a")},)),
    "two": (two, lambda i: (0.7 + 0.3 * i, -0.5 + 0.25 * i)),
    "a counter": (counted, lambda i: (i,)),
}


@pytest.mark.parametrize("amp_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_that_change_at_every_call_are_compiled_three_times(
    name: str, amp_dtype: str | None
) -> None:
    loss_of, numbers_of = PROGRAMS[name]
    pair = Pair.of(loss_of, amp_dtype=amp_dtype)
    for index in range(7):
        pair.call(*numbers_of(index), seed=index, **(CLOSE if amp_dtype is None else CLOSE_LOW))
    assert len(pair.reasons) == 2
    from_groups = "Read from param_groups at every step: optimizer0.group0.lr, "
    assert f"{from_groups}optimizer0.group0.momentum." in pair.train.notes


def reasons(*values: Any) -> list[str]:
    pairs = zip(values, values[1:], strict=False)
    return [f"argument 2 was {was!r} and is {now!r}" for was, now in pairs]


PASSED = "argument 2 crossed a value at which the step branches"
FOLLOWED = "Python numbers that are read at every call: argument 2."
GUARDED = (
    "Python numbers that stay guards, since they decide a branch, a size or what is not computed "
    "with tensors: argument 2."
)


def cut(z: torch.Tensor, y: torch.Tensor, rows: int) -> torch.Tensor:
    return F.cross_entropy(z[:rows], y[:rows])


def added_to_integers(z: torch.Tensor, y: torch.Tensor, count: int) -> torch.Tensor:
    return F.cross_entropy(z, y) * ((y + count) // 2).sum() / 10


def by_tens(z: torch.Tensor, y: torch.Tensor, count: int) -> torch.Tensor:
    return F.cross_entropy(z, y) * (1 + count // 10)


def floored(z: torch.Tensor, y: torch.Tensor, weight: float) -> torch.Tensor:
    return F.cross_entropy(z, y) * (1 + math.floor(weight))


def signed(z: torch.Tensor, y: torch.Tensor, weight: float) -> torch.Tensor:
    return F.cross_entropy(z, y) * math.copysign(1.0, weight)


def by_its_text(z: torch.Tensor, y: torch.Tensor, weight: float) -> torch.Tensor:
    return F.cross_entropy(z, y) * {"0": 2.0, "1": 3.0}[f"{weight:.0f}"]


def at_a_milestone(z: torch.Tensor, y: torch.Tensor, count: int) -> torch.Tensor:
    return F.cross_entropy(z, y) * (2.0 if count in {2, 9} else 1.0)


def dropped(z: torch.Tensor, y: torch.Tensor, p: float) -> torch.Tensor:
    return F.cross_entropy(z + 0 * F.dropout(z.detach(), p), y)


def spaced(z: torch.Tensor, y: torch.Tensor, end: float) -> torch.Tensor:
    """PyTorch's decomposition divides by the number of steps, in Python."""
    return F.cross_entropy(z * torch.linspace(0.1, end, 3), y)


def normed(z: torch.Tensor, y: torch.Tensor, eps: float) -> torch.Tensor:
    return F.cross_entropy(F.layer_norm(z, (3,), eps=eps), y)


def halved(z: torch.Tensor, y: torch.Tensor, count: int) -> torch.Tensor:
    """Integers of 2^54 and more: what float64 makes of them differs by more than their distance."""
    return F.cross_entropy(z, y) * (count * count - (count * count - 1))


# What jumps may jump at a value that nobody tried.
@pytest.mark.parametrize(
    ("loss_of", "values"),
    [
        (cut, (1, 2, 3, 4)), (added_to_integers, (1, 2, 3, 4)), (by_tens, (1, 4, 8, 12)),
        (floored, (0.25, 0.5, 0.75, 1.25)), (signed, (1.5, 1.0, 0.5, -0.5)),
        (by_its_text, (0.8, 0.9, 1.0, 0.2)), (at_a_milestone, (4, 5, 6, 9)),
        (dropped, (0.1, 0.2, 0.3, 0.4)),
        (spaced, (0.5, 1.0, 1.5, 3.0)), (normed, (0.5, 1.0, 1.5, 3.0)),
        (halved, (2**27 + 1, 2**27 + 3, 2**27 + 5, 2**27 + 7)),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)  # fmt: skip
def test_a_number_that_cannot_be_followed_is_compiled_for_each_value(
    loss_of: Loss, values: tuple[Any, ...]
) -> None:
    pair = Pair.of(loss_of)
    for index, value in enumerate(values):
        pair.call(value, seed=index)
        assert (GUARDED in pair.train.notes) == (index >= 2)
    assert pair.reasons == reasons(*values)
    pair.call(values[1])
    assert len(pair.reasons) == len(values) - 1


def test_a_branch_is_taken_as_in_eager_pytorch() -> None:
    """Once compiled for each side, and no more."""
    pair = Pair.of(warmed_up)
    for count in range(10):
        pair.call(count, seed=count)
    assert pair.reasons == [*reasons(0, 1, 2), PASSED]
    pair.call(1)
    assert len(pair.reasons) == 3


def test_another_type_or_a_special_value_is_not_taken_for_the_number() -> None:
    pair = Pair.of(lambda z, y, weight: F.cross_entropy(z, y) * weight)
    for value in (1.0, 2.0, 3.0, 4.0):
        pair.call(value)
    assert pair.train.notes[-1] == FOLLOWED
    for value in (-0.0, 1e-30, 5, True, 2**60):
        pair.call(value)
    assert pair.reasons == [
        *reasons(1.0, 2.0, 3.0),
        "argument 2 was 3.0 and is 5",
        "argument 2 was 5 and is True",
        f"argument 2 was True and is {2**60}",
    ]


def test_shapes_share_what_is_known_and_the_other_arguments_still_count() -> None:
    pair = Pair.of(two)
    for index in range(4):
        pair.call(1.0 + index, 0.5)
    assert len(pair.reasons) == 2
    for index in range(3):
        pair.call(5.0 + index, 0.5, rows=4)
    pair.call(9.0, 0.75)
    pair.call(10.0, 0.75)
    assert pair.reasons[2:] == [
        "argument 0 was of shape (5, 6) and is of shape (4, 6) (dimension 0); argument 1 was of "
        "shape (5,) and is of shape (4,) (dimension 0)",
        "argument 3 was 0.5 and is 0.75",
    ]


def test_a_compiled_step_takes_the_numbers_it_was_captured_to_take() -> None:
    """And refuses another value of those that it was not."""
    model = nn.Linear(1, 1)
    x = torch.ones(2)

    def step(x: torch.Tensor, factor: float, offset: float) -> torch.Tensor:
        return x * factor + offset

    names = frozenset({"argument 1"})
    mod, _ = amp_ir.trace_step(step, (x, 2.0, 1.0), model=model, numbers_as_inputs=names)
    compiled = amp_ir.compile(mod)
    for factor in (2.0, 3.0, math.inf):
        assert compiled(x, factor, 1.0).tolist() == step(x, factor, 1.0).tolist()
    for bad, text in (
        ((x, 3.0, 2.0), "argument 2 is 2.0, captured as the fixed value 1.0"),
        ((x, 3, 1.0), "argument 1 is 3, captured as the fixed value 2.0"),
    ):
        with pytest.raises(errors.ArgumentError) as refused:
            compiled(*bad)
        assert str(refused.value) == (
            f"{text}. Call it as it was captured, or capture (jit) the step again"
        )
    assert compiled(x, 4.0, 1.0).tolist() == [5.0, 5.0]


@pytest.mark.parametrize("asks", [torch.Tensor.is_contiguous, lambda x: x.stride(0) == 3])
def test_a_step_that_asks_for_strides_is_compiled_for_each(asks: Any) -> None:
    model = nn.Linear(1, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if asks(x) else x * 3

    train = amp_ir.jit(step, model=model)
    square = torch.arange(9.0).reshape(3, 3)
    wide = torch.arange(18.0).reshape(3, 6)[:, ::2]
    for x in (square, square.t(), wide, square, square.t(), wide):
        assert train(x).tolist() == step(x).tolist()
    assert [one.reason for one in train.recompiles] == [
        "argument 0 was contiguous and is of strides (1, 3)",
        "argument 0 was of strides (1, 3) and is of strides (6, 2)",
    ]


@pytest.mark.parametrize(
    "activation", [F.leaky_relu, F.elu, lambda y, slope: F.hardtanh(y, -slope, slope)]
)
def test_a_learning_rate_as_a_constant_of_an_op_is_refused_and_works_as_an_argument(
    activation: Any,
) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, slope: float | None = None) -> torch.Tensor:
        if slope is None:
            slope = optimizer.param_groups[0]["lr"]
        loss = activation(model(x), slope).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    x = torch.randn(3, 4)
    with pytest.raises(errors.UnsupportedOpError) as refused:
        amp_ir.trace_step(step, (x,), model=model, optimizer=optimizer)
    assert (
        "takes as a constant a number that changes between steps, as a learning rate does; pass "
        "the number to the step as an argument, which compiles again for each value (1 call, "
        "first in step ("
    ) in str(refused.value)
    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    twin = copy.deepcopy(model)
    for slope in (0.1, 0.1, 0.3):
        expected = activation(twin(x), slope).square().mean()
        gradients = torch.autograd.grad(expected, list(twin.parameters()))
        torch.testing.assert_close(train(x, slope), expected.detach(), **CLOSE)
        with torch.no_grad():
            for parameter, gradient in zip(twin.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient


def every_third(z: torch.Tensor, y: torch.Tensor, count: int) -> torch.Tensor:
    loss = F.cross_entropy(z, y)
    return loss + z.square().mean() if count % 3 == 0 else loss


def accumulated(z: torch.Tensor, y: torch.Tensor, count: int) -> torch.Tensor:
    is_last = (count + 1) % 4 == 0 or count + 1 == 10
    return F.cross_entropy(z, y) * (2.0 if is_last else 1.0)


def not_every_second(z: torch.Tensor, y: torch.Tensor, count: int) -> torch.Tensor:
    return F.cross_entropy(z, y) if -count % 2 else z.square().mean()


def in_rounds(z: torch.Tensor, y: torch.Tensor, count: int) -> torch.Tensor:
    return F.cross_entropy(z, y) * (count % 5) + z.abs().mean() * (-count % -3)


@pytest.mark.parametrize(
    ("loss_of", "programs"),
    # Two compiles of numbers, and one for each way that the branches go from the third call on.
    [(every_third, 4), (accumulated, 5), (not_every_second, 4), (in_rounds, 3)],
)
def test_a_remainder_is_followed(loss_of: Loss, programs: int) -> None:
    pair = Pair.of(loss_of)
    for count in range(14):
        pair.call(count, seed=count)
    assert len(pair.reasons) + 1 <= programs
    assert FOLLOWED in pair.train.notes
    # Far away, and back: nothing is compiled.
    before = len(pair.reasons)
    for count in (10**6 + 2, 2**40 + 1, 3):
        pair.call(count)
    assert len(pair.reasons) == before


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda z, y, count: F.cross_entropy(z, y) * (count % 2.5),
        lambda z, y, count: F.cross_entropy(z[:, count % 3 :], y * 0),
        lambda z, y, count: F.cross_entropy(z, y) * (7 % (count + 1)),
    ],
    ids=["of floats", "a size", "by a number that changes"],
)
def test_other_remainders_stay_guards(loss_of: Loss) -> None:
    pair = Pair.of(loss_of)
    for count in range(5):
        pair.call(count, seed=count)
    assert pair.reasons == reasons(*range(5))
    assert GUARDED in pair.train.notes
