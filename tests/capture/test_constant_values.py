# SPDX-License-Identifier: Apache-2.0
"""Values that no input reaches are read in Python as the step has written them until then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.errors import CaptureError


def entry() -> float:
    a = torch.zeros(4)
    a[0] = 1.0
    return float(a.sum())


def in_place() -> float:
    return float(torch.zeros(3).masked_fill_(torch.eye(3, dtype=torch.bool)[0], 2.0).sum())


def through_a_view() -> float:
    a = torch.zeros(4)
    a[:2].add_(1.0)
    return float(a.sum())


def into_the_base_of_a_view() -> float:
    a = torch.zeros(4)
    b = a.view(2, 2)
    a[3] = 5.0
    return float(b[1, 1])


def of_a_literal() -> float:
    c = torch.tensor([1.0, 2.0])
    c += 1
    c[0] *= 0
    return float(c[1] + c[0])


def before_a_later_write() -> float:
    a = torch.zeros(4)
    a[1:].fill_(1.0)
    n = int(a.sum())
    a.zero_()
    return n + float(a.sum())


def out_argument() -> float:
    a = torch.zeros(4)
    torch.add(a, 1.0, out=a)
    a.detach().mul_(3.0)
    return float(a.sum())


READS = [
    entry,
    in_place,
    through_a_view,
    into_the_base_of_a_view,
    of_a_literal,
    before_a_later_write,
    out_argument,
]


@pytest.mark.parametrize("read", READS, ids=lambda one: one.__name__)
def test_what_was_written_is_read(read: Callable[[], float]) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * (read() + 1.0)

    x = torch.randn(3)
    train = amp_ir.jit(step, model=nn.Linear(1, 1))
    for _ in range(2):
        torch.testing.assert_close(train(x), step(x))


def test_a_constant_of_the_module_stays_as_it_is() -> None:
    kept = torch.ones(2)

    def step(x: torch.Tensor) -> torch.Tensor:
        mine = kept.clone()
        mine += 1
        return x * mine.sum()

    x = torch.randn(3)
    torch.testing.assert_close(amp_ir.jit(step, model=nn.Linear(1, 1))(x), 4 * x)
    assert kept.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "write",
    [
        lambda a, x: a[:1].copy_(x[:1]),
        lambda a, x: a.add_(x.sum()),
        lambda a, _: a[1:].normal_(),
    ],
    ids=["view", "whole", "random"],
)
def test_what_an_input_or_a_draw_writes_is_no_constant(write: Callable[[Any, Any], Any]) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        a = torch.zeros(4)
        write(a, x)
        return x * (2.0 if bool(a.sum() != 0) else 3.0)

    with pytest.raises(CaptureError, match="a tensor's value is read in Python"):
        amp_ir.jit(step, model=nn.Linear(1, 1))(torch.randn(3))


@pytest.mark.parametrize("is_float", [True, False])
def test_a_transformer_encoder_reads_its_own_mask(is_float: bool) -> None:
    """It makes a float mask of a bool one in place, and compares it with the causal one."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def step(x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return model(x, mask=mask if is_float else mask.isinf()).square().mean().detach()

    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(amp_ir.jit(step, model=model)(x), step(x))
