# SPDX-License-Identifier: Apache-2.0
"""Rows chosen by an integer tensor without axes, such as the position of a queue."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.errors import CaptureError, IndexOutOfRangeError

Step = Callable[["Queue", torch.Tensor], torch.Tensor]


class Queue(nn.Module):
    """A layer beside a queue of rows and its position."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("rows", torch.arange(24.0).view(6, 4))
        self.register_buffer("at", torch.tensor(2))
        self.rows: torch.Tensor
        self.at: torch.Tensor


def ring(m: Queue, x: torch.Tensor) -> torch.Tensor:
    m.rows[m.at % 6] = m.layer(x).detach().mean(0)
    m.at += 1
    return m.rows.clone()


def column(m: Queue, x: torch.Tensor) -> torch.Tensor:
    m.rows[1:, m.at] = x.mean() * torch.arange(5.0)
    m.rows[m.at] = x[:1]
    return m.rows.clone()


def beside_others(m: Queue, x: torch.Tensor) -> torch.Tensor:
    y = torch.stack([x, x + 1, x + 2]).to(torch.float64)
    y[..., m.at, None, :2] = 3
    y[-1, (m.at - 4).int(), 1] = x[0, 0]  # from the end
    return y


def with_gradients(m: Queue, x: torch.Tensor) -> torch.Tensor:
    y = m.layer(x)
    y[:, x[0].argmax()] = m.layer(x + 1)[:, 0] * 2
    return y


def read_as_advised(m: Queue, x: torch.Tensor) -> torch.Tensor:
    return m.layer(x).index_select(1, m.at.reshape(1)).squeeze(1)


STEPS: list[Step] = [ring, column, beside_others, with_gradients, read_as_advised]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_rows_chosen_by_a_tensor_are_those_of_eager(step: Step) -> None:
    torch.manual_seed(0)
    ours = Queue()
    theirs = copy.deepcopy(ours)
    x = torch.randn(4, 4)

    def train(model: Queue, x: torch.Tensor) -> torch.Tensor:
        result = step(model, x)
        if result.requires_grad:
            result.square().sum().backward()
        return result.detach()

    compiled = amp_ir.jit(lambda x: train(ours, x), model=ours)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), train(theirs, x))
    for one, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(one, other)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_a_row_that_is_not_there_changes_nothing() -> None:
    model = Queue()
    compiled = amp_ir.jit(lambda x: column(model, x), model=model)
    compiled(torch.ones(4, 4))
    model.at.fill_(6)
    before = model.rows.clone()
    with pytest.raises(IndexOutOfRangeError):
        compiled(torch.ones(4, 4))
    torch.testing.assert_close(model.rows, before)
    assert int(model.at) == 6


def in_place(m: Queue, x: torch.Tensor) -> torch.Tensor:
    m.rows[m.at] += x[0]
    return m.rows.clone()


def a_column(m: Queue, x: torch.Tensor) -> torch.Tensor:
    return m.layer(x)[:, m.at]


@pytest.mark.parametrize(
    ("step", "advice"),
    [
        (in_place, r"x.index_select\(0, k.reshape\(1\)\).squeeze\(0\)"),
        (a_column, r"x.index_select\(1, k.reshape\(1\)\).squeeze\(1\)"),
    ],
)
def test_a_view_that_a_number_decides_is_refused(step: Step, advice: str) -> None:
    model = Queue()
    before = model.rows.clone()
    with pytest.raises(CaptureError, match=f"as a view that the number in k decides.*{advice}"):
        amp_ir.jit(lambda x: step(model, x), model=model)(torch.ones(4, 4))
    torch.testing.assert_close(model.rows, before)
