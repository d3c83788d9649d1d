# SPDX-License-Identifier: Apache-2.0
"""A step that padding changes is refused, with the line of the user's code where it leaks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amp_ir.errors import ArgumentError, PaddingError
from leak_texts import MASK, TEXTS
from padded_losses import logits, masked_mean
from padded_models import POOLED, TAGGED, WIDTH, Made, Net, labels, pooled, tagged, training
from padded_steps import Case, proof_of

# (model, x: f32[rows, length, width], mask: f32[rows, length]) -> f32[rows, width]
POOLS: dict[str, Callable[..., torch.Tensor]] = {
    "mean without the mask": lambda m, x, k: x.mean(1),
    "sum without the mask": lambda m, x, k: x.sum(1),
    "sum over the length": lambda m, x, k: (x * k[..., None]).sum(1) / x.shape[1],
    "max without the mask": lambda m, x, k: x.amax(1),
    "max of relu and 0": lambda m, x, k: (x * k[..., None]).amax(1),
    "last step": lambda m, x, k: x[:, -1],
    "last three steps": lambda m, x, k: x[:, -3:].sum(1),
    "standard deviation": lambda m, x, k: x.std(1),
    "argmax": lambda m, x, k: F.one_hot(x.argmax(1), WIDTH).sum(1) + x[:, 0],
    "cumsum at the end": lambda m, x, k: x.cumsum(1)[:, -1],
    "cumsum of rows in a row": lambda m, x, k: masked_mean(
        x.reshape(-1, WIDTH).detach().cumsum(0).reshape(x.shape), k
    ),
    "softmax over the length": lambda m, x, k: (x.softmax(1) * x).sum(1),
    "norm over the length": lambda m, x, k: F.layer_norm(x.transpose(1, 2), x.shape[1:2]).mean(-1),
    "attention without the mask": lambda m, x, k: F.scaled_dot_product_attention(x, x, x)[:, 0],
    "attention to the length": lambda m, x, k: masked_mean(
        F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=1 / x.shape[1]), k
    ),
    "batch norm": lambda m, x, k: masked_mean(
        F.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2), k
    ),
    "group norm": lambda m, x, k: masked_mean(
        F.group_norm(x.transpose(1, 2), 1).transpose(1, 2), k
    ),
    "interpolation": lambda m, x, k: F.interpolate(x.transpose(1, 2), size=4).mean(-1),
    "adaptive pooling": lambda m, x, k: F.adaptive_avg_pool1d(x.transpose(1, 2), 1)[..., 0],
    "reversal": lambda m, x, k: masked_mean(x.flip(1) + x, k),
    "number of all entries": lambda m, x, k: (
        (x * k[..., None]).sum(1) / torch.ones_like(k.flatten()).sum()
    ),
    "rows of -1e9, which float16 makes -inf": lambda m, x, k: masked_mean(
        (x @ x.transpose(1, 2)).masked_fill(k[:, None] * k[..., None] == 0, -1e9).softmax(-1) @ x,
        k,
    ),
    "rows of -inf": lambda m, x, k: masked_mean(
        (x @ x.transpose(1, 2)).masked_fill(k[:, None] * k[..., None] == 0, -torch.inf).softmax(-1)
        @ x,
        k,
    ),
    "window of -inf": lambda m, x, k: masked_mean(
        (x @ x.transpose(1, 2))
        .masked_fill(k[:, None] == 0, -torch.inf)
        .masked_fill(torch.ones(x.shape[1], x.shape[1]).tril(-2).bool(), -torch.inf)
        .softmax(-1)
        @ x,
        k,
    ),
    "two softmaxes that meet": lambda m, x, k: (
        lambda s: x[:, 0] * (s.softmax(1) * s.softmax(2)).sum((1, 2))[:, None]
    )((x @ x.transpose(1, 2)).masked_fill(k[:, None] * k[..., None] == 0, -1e9)),
    "mask that is taken back": lambda m, x, k: (
        (x.sum(-1) + (1 - k) * -1e9 + (1 - k) * 1e9).softmax(1)[..., None] * x
    ).sum(1),
    "filled up in front": lambda m, x, k: (
        F.pad(x * k[..., None], (0, 0, 64 - x.shape[1], 0)) * m.table
    ).sum(1),
    "filled up with another number": lambda m, x, k: (
        F.pad(x * k[..., None], (0, 0, 0, 64 - x.shape[1]), value=1.0) * m.table
    ).sum(1),
}
# (model, ids: i64[rows, length], mask: f32[rows, length], labels: i64[rows, length]) -> loss
LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "labels that count": lambda m, i, k, y: F.cross_entropy(
        logits(m, i).transpose(1, 2), y, ignore_index=-1
    ),
    "mean of losses": lambda m, i, k, y: F.cross_entropy(
        logits(m, i).transpose(1, 2), y, reduction="none"
    ).mean(),
    "mean squared error": lambda m, i, k, y: F.mse_loss(logits(m, i)[..., 0], y.float()),
    "sum of squares": lambda m, i, k, y: ((logits(m, i)[..., 0] - y) ** 2).sum(),
    "length as a number": lambda m, i, k, y: (
        F.cross_entropy(logits(m, i).flatten(0, 1), y.flatten(), reduction="sum") / i.numel()
    ),
    "rows of a table": lambda m, i, k, y: m.table[i].sum() * 0.1,
    "chosen classes": lambda m, i, k, y: logits(m, i).gather(-1, k.long()[..., None]).sum(),
}
LEAKS = [
    *(("pool", name, one) for name, one in POOLS.items()),
    *(("loss", name, one) for name, one in LOSSES.items()),
]


@pytest.mark.parametrize(("kind", "name", "leak"), LEAKS, ids=[name for _, name, _ in LEAKS])
def test_a_leak_is_refused_at_its_line(
    kind: str, name: str, leak: Callable[..., torch.Tensor]
) -> None:
    case = Case(pooled(leak), POOLED) if kind == "pool" else Case(tagged(leak), TAGGED)
    with pytest.raises(PaddingError) as caught:
        proof_of(case).conclusion()
    lines, first = inspect.getsourcelines(leak)
    places = [f"{__file__}:{first + k}" for k in range(len(lines))]
    begun, *leaks, advice = str(caught.value).splitlines()
    assert (begun, advice) == ("padding may change what the step computes:", MASK)
    told = [re.fullmatch(r"  step \(forward\), (\S+): (\S+: .*)", one) for one in leaks]
    assert [one[2] for one in told if one] == TEXTS[name]
    assert all(one and one[1] in places for one in told), leaks


WRAPPED: dict[str, tuple[torch.dtype, int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "a cast to fewer bits": (torch.int64, 256, lambda k: k.to(torch.uint8) == 0),
    "a sum beyond uint8": (torch.uint8, 255, lambda k: k + 1 == 0),
    "a product beyond int8": (torch.int8, 64, lambda k: k * 4 == 0),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_integers_that_wrap_around_at_padding_hide_nothing(name: str) -> None:
    """The sum counts rows where the number is 0, as that of padding is, which only wraps to it."""
    dtype, number, is_kept = WRAPPED[name]

    def make(length: int) -> Made:
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        x, numbers = torch.randn(2, length, 3), torch.zeros(2, length, dtype=dtype)

        def loss(m: Any, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return torch.where(is_kept(k)[..., None], m(x), 0.0).sum()

        return training(model, loss, (x, numbers))

    case = Case(make, [({1: 0}, 1.0), ({1: 0}, number)])
    with pytest.raises(PaddingError, match="elements are added over dimension 0"):
        proof_of(case).conclusion()


def test_contrast_over_the_batch_is_refused() -> None:
    def make(rows: int) -> Made:
        def loss_of(m: Any, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(m.mix(x) @ z.t(), torch.arange(x.shape[0]))

        return training(Net(), loss_of, (torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)))

    case = Case(make, (({0: 0}, 0.0), ({0: 0}, 0.0)))
    with pytest.raises(PaddingError, match="softmax over dimension 0 gives padding a weight"):
        proof_of(case).conclusion()


def test_batch_statistics_of_padded_rows_are_refused() -> None:
    def make(rows: int) -> Made:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3))

        def loss_of(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(m(x), y)

        return training(model, loss_of, (torch.randn(rows, WIDTH), labels(rows)))

    with pytest.raises(PaddingError, match="batch_norm"):
        proof_of(Case(make, (({0: 0}, 0.0), ({0: 0}, -100.0)))).conclusion()


def test_sizes_that_differ_by_the_same_number_are_refused() -> None:
    def make(length: int, rows: int) -> Made:
        model = Net()
        return lambda x: model.mix(x), model, None, (torch.randn(rows, length, WIDTH),)

    with pytest.raises(ArgumentError) as caught:
        proof_of(Case(make, (({0: 1, 1: 0}, 0.0),), sizes=((8, 13), (2, 7))))
    assert str(caught.value) == (
        "dimension 1 and dimension 0 have sizes in the two captures that differ by the same "
        "number, -5; an axis could follow either. Choose another size"
    )


def test_the_message_says_where_and_what_to_do() -> None:
    with pytest.raises(PaddingError) as caught:
        proof_of(Case(pooled(POOLS["sum without the mask"]), POOLED)).conclusion()
    line = POOLS["sum without the mask"].__code__.co_firstlineno
    assert str(caught.value) == (
        "padding may change what the step computes:\n"
        f"  step (forward), {__file__}:{line}: relax.sum: elements are added over "
        "dimension 0, where padding is not 0\n"
        "Mask the padding there (masked attention, ignored labels, sums of masked values over the "
        "mask's sum), or call the step without buckets="
    )
