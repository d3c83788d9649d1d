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
from own_function import Doubled

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


def moved_on_after(m: Queue, x: torch.Tensor) -> torch.Tensor:
    """Backward looks up where the row was put, and k has gone on by then."""
    y = m.layer(x)
    y[m.at] = y[0] * 3
    m.at.add_(1).remainder_(4)
    return y


def read_as_advised(m: Queue, x: torch.Tensor) -> torch.Tensor:
    return m.layer(x).index_select(1, m.at.reshape(1)).squeeze(1)


def in_place(m: Queue, x: torch.Tensor) -> torch.Tensor:
    m.rows[m.at] += x[0]
    m.rows[m.at - 7] *= 2  # from the end
    m.rows[1:, m.at].clamp_(max=10)
    return m.rows.clone()


def a_column(m: Queue, x: torch.Tensor) -> torch.Tensor:
    return m.layer(x)[:, m.at]


def counts(m: Queue, x: torch.Tensor) -> torch.Tensor:
    for k in x.argmax(1):
        m.rows[:, 1][k] += 1
    return m.rows.clone()


def changed_after(m: Queue, x: torch.Tensor) -> torch.Tensor:
    """Views show later writes to x, and x what is written to them; k may go on."""
    row = m.rows[m.at]
    m.at.add_(1).remainder_(6)
    m.rows += 1
    row.mul_(2)
    row[1] = 5.0
    return torch.stack([row, m.rows[m.at], row.detach() + 1, m.rows.sum(0)])


def moved(m: Queue, x: torch.Tensor) -> torch.Tensor:
    y = m.layer(x)
    y[m.at] = y[m.at - 1] * 2
    y[m.at - 1] += torch.nn.functional.softmax(y[m.at - 2], 0)
    return y


def many_uses(m: Queue, x: torch.Tensor) -> torch.Tensor:
    y = m.layer(x)
    row = y[m.at - 1]
    near = torch.cdist(x, y)
    parts = [torch.nn.functional.mse_loss(row, m.rows[m.at]), row.max(), (row @ y.T).sum()]
    return torch.stack([*parts, near.sum(), row.new_tensor(float(row.shape[0] + row.dim()))])


def own_function(m: Queue, x: torch.Tensor) -> torch.Tensor:
    return Doubled.apply(m.layer(x)[m.at - 1])


def confusion(m: Queue, x: torch.Tensor) -> torch.Tensor:
    """Count pairs, one after the other: what comes twice counts twice."""
    guesses = m.layer(x).argmax(1)
    for label, guess in zip([m.at, m.at, *(m.at + 1 - guesses[:2])], guesses, strict=True):
        m.rows[label, guess] += 1
    return m.rows.clone()


def pairs_at_once(m: Queue, x: torch.Tensor) -> torch.Tensor:
    """Write through tensors with an axis: what comes twice counts once."""
    m.rows[m.at.expand(4), x.argmax(1)] += 1
    return m.rows.clone()


def several_places(m: Queue, x: torch.Tensor) -> torch.Tensor:
    y, j = torch.stack([m.layer(x), x * 2, x]), x[0].argmax()
    y[m.at - 1, :, j] = x[:, 0]
    y[m.at, 1, j - 4] *= 3
    y[..., m.at, None, j.int()] += y[0, m.at, j].clone()
    return torch.stack([y[m.at, 1:, j].sum(), y[m.at, -1, m.at], y[m.at, m.at].sum(), y.sum()])


def places_that_change(m: Queue, x: torch.Tensor) -> torch.Tensor:
    element = m.rows[m.at, m.at]
    m.at.sub_(1)
    element.mul_(2).add_(x[0, 0])
    m.rows += 1
    return torch.stack([element, element.detach() + 1, m.rows.sum()])


STEPS: list[Step] = [
    ring, column, beside_others, with_gradients, moved_on_after, read_as_advised, in_place,
    a_column, counts, changed_after, moved, many_uses, confusion, pairs_at_once, several_places,
    places_that_change, own_function,
]  # fmt: skip


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


def an_element(m: Queue, x: torch.Tensor) -> torch.Tensor:
    m.rows[m.at][m.at] += 1
    return m.rows.clone()


def a_part(m: Queue, x: torch.Tensor) -> torch.Tensor:
    return m.layer(x)[:, m.at][1:]


def data(m: Queue, x: torch.Tensor) -> torch.Tensor:
    m.layer.bias.data = m.rows[m.at]
    return m.layer(x)


def several(m: Queue, x: torch.Tensor) -> torch.Tensor:
    torch._foreach_add_([m.rows[m.at]], 1.0)
    return m.rows.clone()


def test_a_view_of_an_element_is_refused() -> None:
    model = Queue()

    def step(x: torch.Tensor) -> torch.Tensor:
        return model.layer(x)[model.at, model.at].view(1)

    with pytest.raises(CaptureError) as caught:
        amp_ir.jit(step, model=model)(torch.ones(4, 4))
    assert str(caught.value).endswith(
        ": views x[k], where k is a tensor without axes, which is a view that the number in k "
        "decides. Take a copy: x[i, k].clone()"
    )


@pytest.mark.parametrize(
    ("step", "what", "axis"),
    [
        (an_element, "views", 0),
        (a_part, "views", 1),
        (data, "is given", 0),
        (several, "is given", 0),
    ],
)
def test_a_view_of_such_a_view_is_refused(step: Step, what: str, axis: int) -> None:
    model = Queue()
    before = model.rows.clone()
    with pytest.raises(CaptureError) as caught:
        amp_ir.jit(lambda x: step(model, x), model=model)(torch.ones(4, 4))
    assert str(caught.value).endswith(
        f": {what} x[k], where k is a tensor without axes, which is a view that the number in k "
        f"decides. Take a copy: x.index_select({axis}, k.reshape(1)).squeeze({axis})"
    )
    torch.testing.assert_close(model.rows, before)


def test_a_row_is_a_result_and_is_kept_nowhere() -> None:
    model = Queue()
    held: list[object] = [None]

    def step(x: torch.Tensor, k: torch.Tensor) -> object:
        return {"row": x[k], "others": [x[:, k]]}

    def keeping(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        held[0] = x[k]
        return x.sum()

    x, k = torch.randn(4, 4), torch.tensor(-1)
    torch.testing.assert_close(amp_ir.jit(step, model=model)(x, k), step(x, k))
    with pytest.raises(CaptureError, match="keeps a tensor of shape"):
        amp_ir.jit(keeping, model=model)(x, k)
