# SPDX-License-Identifier: Apache-2.0
"""One training step with every op that reads or writes by an index, each by indices of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn

ROWS, COLUMNS = 4, 5


@attrs.frozen
class Indexed:
    """`function(w, ids)` of a weight f32[4, 5]: an op of aten `overload` by `good` indices.

    What PyTorch allows is left to PyTorch; `extent` is that of the axis, to try indices around it.
    """

    name: str
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    extent: int
    good: torch.Tensor
    ignored: int | None = None


def _ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def _everywhere(rows: int) -> torch.Tensor:
    return torch.tensor([[0, 2]] * rows)


def _put_in_place(w: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    copy = w * 1
    copy[:, i] = w[:, :2] * 2
    return copy


CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 0.25, 1.5])
ONES = torch.ones(2, COLUMNS)

INDEXED = [
    Indexed("embedding", lambda w, i: F.embedding(i, w), ROWS, _ids(0, 3, 3)),
    Indexed("embedding with padding", lambda w, i: F.embedding(i, w, -1), ROWS, _ids(0, 3)),
    Indexed("embedding_bag", lambda w, i: F.embedding_bag(i[None], w), ROWS, _ids(0, 3)),
    Indexed("index", lambda w, i: w[:, i], COLUMNS, _ids(1, 4)),
    Indexed("index twice", lambda w, i: w[i, i], ROWS, _ids(1, 3)),
    Indexed("index_select", lambda w, i: w.index_select(1, i), COLUMNS, _ids(1, 4)),
    Indexed("index_select of 0-d", lambda w, i: w.sum().index_select(0, i), 1, _ids(0)),
    Indexed("gather", lambda w, i: w.gather(1, i), COLUMNS, _everywhere(ROWS)),
    Indexed("gather of 0-d", lambda w, i: w.sum().gather(0, i), 1, _ids(0, 0)),
    Indexed("take", lambda w, i: w.take(i), ROWS * COLUMNS, _ids(19, 0)),
    Indexed("take_along_dim", lambda w, i: w.take_along_dim(i, 1), COLUMNS, _everywhere(ROWS)),
    Indexed("put", lambda w, i: w.put(i, torch.ones(2)), ROWS * COLUMNS, _ids(19, 0)),
    Indexed(
        "put and add", lambda w, i: w.put(i, w[0, :2], accumulate=True), ROWS * COLUMNS, _ids(19, 0)
    ),
    Indexed("index_put", lambda w, i: w.index_put((i,), ONES), ROWS, _ids(1, 2)),
    Indexed("index_put and add", lambda w, i: w.index_put((i,), w[:2], True), ROWS, _ids(1, 1)),
    Indexed("assignment", _put_in_place, COLUMNS, _ids(0, 3)),
    Indexed("index_add", lambda w, i: w.index_add(0, i, w[:2], alpha=0.5), ROWS, _ids(1, 1)),
    Indexed("index_copy", lambda w, i: w.index_copy(0, i, w[:2] * 2), ROWS, _ids(3, 1)),
    Indexed("index_fill", lambda w, i: w.index_fill(0, i, 2.0), ROWS, _ids(3, 1)),
    Indexed("scatter", lambda w, i: w.scatter(1, i, w[:, :2] * 2), COLUMNS, _everywhere(ROWS)),
    Indexed("scatter a value", lambda w, i: w.scatter(1, i, 2.0), COLUMNS, _everywhere(ROWS)),
    Indexed("scatter of 0-d", lambda w, i: w.sum().scatter(0, i, 2.0) * w, 1, _ids(0)),
    Indexed("scatter_add", lambda w, i: w.scatter_add(1, i, w[:, :2]), COLUMNS, _everywhere(ROWS)),
    Indexed("scatter_add of 0-d", lambda w, i: w.sum().scatter_add(0, i, w[0, :1]), 1, _ids(0)),
    Indexed(
        "scatter_reduce", lambda w, i: w.scatter_reduce(1, i, w[:, :2] * 2, "sum"), COLUMNS,
        _everywhere(ROWS),
    ),
    Indexed(
        "scatter_reduce amax", lambda w, i: w.scatter_reduce(1, i, w[:, :2] * 2, "amax"), COLUMNS,
        _everywhere(ROWS),
    ),
    Indexed(
        "scatter_reduce mean",
        lambda w, i: w.scatter_reduce(1, i, w[:, :2] * 2, "mean", include_self=False), COLUMNS,
        _everywhere(ROWS),
    ),
    Indexed("one_hot", lambda w, i: F.one_hot(i, COLUMNS).float() @ w.t(), COLUMNS, _ids(4, 0)),
    Indexed("nll_loss", lambda w, i: F.nll_loss(w, i), COLUMNS, _ids(4, 0, 0, 1), -100),
    Indexed(
        "nll_loss of one", lambda w, i: F.nll_loss(w[0], i.reshape(())), COLUMNS, _ids(4), -100
    ),
    Indexed(
        "nll_loss 2d",
        lambda w, i: F.nll_loss(w.reshape(1, 5, 2, 2), i.reshape(1, 2, 2), ignore_index=255),
        COLUMNS, _ids(4, 0, 0, 1), 255,
    ),
    Indexed(
        "cross_entropy",
        lambda w, i: F.cross_entropy(w, i, CLASS_WEIGHTS, ignore_index=-3, label_smoothing=0.1),
        COLUMNS, _ids(4, 0, 0, 1), -3,
    ),
    Indexed("multi_margin_loss", lambda w, i: F.multi_margin_loss(w, i), COLUMNS, _ids(4, 0, 2, 1)),
    Indexed(
        "weighted multi_margin_loss",
        lambda w, i: F.multi_margin_loss(w, i, weight=CLASS_WEIGHTS), COLUMNS, _ids(4, 0, 2, 1),
    ),
    Indexed(
        "max_unpool1d",
        lambda w, i: F.max_unpool1d(w[None, :2, :2], i.reshape(1, 2, 2), 2), 4, _ids(0, 3, 1, 2),
    ),
    Indexed(
        "max_unpool2d",
        lambda w, i: F.max_unpool2d(w[:2, :1].reshape(1, 2, 1, 1), i.reshape(1, 2, 1, 1), 2), 4,
        _ids(3, 1),
    ),
    Indexed(
        "max_unpool3d",
        lambda w, i: F.max_unpool3d(w[:2, :1].reshape(1, 2, 1, 1, 1), i.reshape(1, 2, 1, 1, 1), 2),
        8, _ids(7, 1),
    ),
]  # fmt: skip


class Weights(nn.Module):
    """One weight f32[4, 5] for each op."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.each = nn.ParameterList([torch.randn(ROWS, COLUMNS) for _ in INDEXED])


@attrs.frozen
class Training:
    """A model with its optimizer and a step of all the ops.

    With `is_computed` the step is given floats and makes the indices itself.
    """

    is_computed: bool
    model: Weights = attrs.field(factory=Weights)
    optimizer: torch.optim.Optimizer = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.005, momentum=0.9)
        object.__setattr__(self, "optimizer", optimizer)

    def step(self, *given: torch.Tensor) -> list[torch.Tensor]:
        """Train once; returns the loss of each op."""
        losses = []
        for one, weight, ids in zip(INDEXED, self.model.each, given, strict=True):
            indices = ids.long() if self.is_computed else ids
            losses.append(one.function(weight, indices).square().sum())
        self.optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        self.optimizer.step()
        return [one.detach() for one in losses]

    def batch(self, changed: int = -1, first: int = 0) -> tuple[torch.Tensor, ...]:
        """Good indices, but that the first one of op `changed` is `first`."""
        ids = [one.good.clone() for one in INDEXED]
        if changed >= 0:
            ids[changed].view(-1)[0] = first
        return tuple(one.float() if self.is_computed else one for one in ids)

    def state(self) -> list[torch.Tensor]:
        """Copies of everything that a step changes, gradients included."""
        held: list[Any] = []
        for weight in self.model.parameters():
            held += [weight, weight.grad, *self.optimizer.state[weight].values()]
        return [one.detach().clone() for one in held if one is not None]


def same(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> bool:
    """Whether two states are bit-identical."""
    pairs = list(zip(before, after, strict=True))
    return all(torch.equal(one, other) for one, other in pairs)
