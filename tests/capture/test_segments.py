# SPDX-License-Identifier: Apache-2.0
"""Offsets and lengths of segments that PyTorch refuses, or reads foreign memory for, are errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir
from amp_ir.errors import SequenceLengthError

IDS = torch.tensor([1, 2, 3, 4, 5, 6])
TABLE = "offsets of embedding_bag never decrease, and are at most 6, the number of ids"
BEGIN = "the offsets of embedding_bag begin with 0; got 1, in "
END = "with include_last_offset=True the last offset of embedding_bag is the number of ids, 6; got "
WITHIN = "are 0 to 6, the extent of the axis; got "
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def step_of(loss: Loss, rows: int) -> tuple[nn.Linear, Any]:
    """Return a model whose weight, f32[rows, 3], the loss is given beside a batch, and a step."""
    torch.manual_seed(0)
    model = nn.Linear(3, rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> torch.Tensor:
        result = loss(model.weight, batch)
        result.backward()
        optimizer.step()
        optimizer.zero_grad()
        return result.detach()

    return model, amp_ir.jit(step, model=model, optimizer=optimizer)


def bags(**options: Any) -> Loss:
    return lambda w, offsets: F.embedding_bag(IDS, w, offsets, **options).square().sum()


def segments(kind: str, reduce: str = "sum", **options: Any) -> Loss:
    def loss(w: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        reduced = torch.segment_reduce(w[:6], reduce, **{kind: given}, **options)
        return reduced.square().sum()

    return loss


# (loss, batches that PyTorch takes, batches that are refused, with what is said of each)
CASES: dict[str, tuple[Loss, list[list[int]], dict[tuple[int, ...], str]]] = {
    **{
        f"bags, {mode}, {options}": (
            bags(mode=mode, **options),
            [[0, 2, 6], [0, 0, 3], [0, 3, 3]],
            {
                (0, 4, 2): f"{TABLE}: no bag is shorter than 0; got -2, in ",
                (0, -1, 2): f"{TABLE}: no bag is shorter than 0; got -1, in ",
                (0, 2, 9): f"{TABLE}: no bag is shorter than 0; got -3, in ",
                (1, 2, 3): BEGIN,
            },
        )
        for mode in ("sum", "mean")
        for options in ({}, {"scale_grad_by_freq": True})
    },
    "bags with their end": (
        bags(mode="sum", include_last_offset=True),
        [[0, 2, 6], [0, 6, 6]],
        {(0, 4, 2): f"{END}2", (0, 2, 4): f"{END}4", (0, 2, 9): f"{END}9", (1, 2, 6): BEGIN},
    ),
    "maxima of bags": (bags(mode="max"), [[0, 2, 6], [0, 4, 2]], {}),
    "offsets of segments": (
        segments("offsets"),
        [[0, 2, 6], [1, 2, 4], [0, 0, 6]],
        {
            (0, 4, 2): "never decrease: no segment is shorter than 0; got -2",
            (0, 4, 900): f"offsets of segment_reduce {WITHIN}900",
            (-5, 4, 6): f"offsets of segment_reduce {WITHIN}-5",
            (0, 9 * 10**8, 6): f"offsets of segment_reduce {WITHIN}900000000",
        },
    ),
    "lengths of segments": (
        segments("lengths", "mean"),
        [[2, 4], [5, 1]],
        {
            (2, 3): "the sum of lengths of segment_reduce is 6, the extent of the axis; got 5",
            (-1, 7): f"lengths of segment_reduce {WITHIN}-1",
        },
    ),
    "unsafe lengths": (
        segments("lengths", "max", unsafe=True),
        [[2, 4], [2, 3]],
        {
            (2, 5): "the sum of lengths of segment_reduce is at most 6, the extent of the axis; go",
            (2, 9 * 10**8): f"lengths of segment_reduce {WITHIN}900000000",
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_segments_change_nothing(name: str) -> None:
    loss, right, wrong = CASES[name]
    model, train = step_of(loss, 7)
    reference, _ = step_of(loss, 7)
    for batch in right:
        weight = reference.weight.detach().clone().requires_grad_()
        expected = loss(weight, torch.tensor(batch))
        expected.backward()
        assert weight.grad is not None
        reference.weight.data.sub_(weight.grad, alpha=0.1)
        # A few roundings of float32 in each step.
        torch.testing.assert_close(train(torch.tensor(batch)), expected.detach(), rtol=1e-5, atol=0)
        before = model.weight.detach().clone()
        for given, message in wrong.items():
            with pytest.raises(SequenceLengthError) as caught:
                train(torch.tensor(given))
            assert message in str(caught.value)
            torch.testing.assert_close(model.weight.detach(), before, rtol=0, atol=0)
    torch.testing.assert_close(model.weight, reference.weight, rtol=1e-4, atol=1e-5)
    assert not train.recompiles


def test_under_transforms_of_functions() -> None:
    total = bags(mode="sum")

    def loss(w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        slope: Any = torch.func.grad(total)(w, offsets)
        each: Any = torch.func.vmap(total, in_dims=(0, None))(torch.stack([w, 2 * w]), offsets)
        return (w * slope).sum() + each.sum()

    model, train = step_of(loss, 7)
    good = torch.tensor([0, 2, 6])
    # A form of degree 2: the gradient's product with its argument is twice its value.
    expected = (2 + 1 + 4) * total(model.weight.detach(), good)
    torch.testing.assert_close(train(good), expected, rtol=1e-5, atol=0)
    with pytest.raises(SequenceLengthError, match="no bag is shorter than 0; got -2"):
        train(torch.tensor([0, 4, 2]))


@pytest.mark.parametrize("loss", [bags(mode="mean"), segments("offsets")])
def test_in_graphs_of_torch_compile(loss: Loss) -> None:
    weight = torch.randn(7, 3, requires_grad=True)
    compiled = torch.compile(loss, backend="amp_ir")
    good = torch.tensor([0, 2, 6])
    torch.testing.assert_close(compiled(weight, good), loss(weight, good), rtol=1e-5, atol=0)
    with pytest.raises(SequenceLengthError, match="shorter than 0; got -2"):
        compiled(weight, torch.tensor([0, 4, 2]))
