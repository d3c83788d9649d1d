# SPDX-License-Identifier: Apache-2.0
"""Small training steps on batches of any length, as users write them, for the padding proof."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, CLASSES, WORDS, ROWS = 6, 3, 20, 2
Made = tuple[Callable[..., Any], Any, Any, tuple[Any, ...]]


def training(
    model: nn.Module,
    loss_of: Callable[..., torch.Tensor],
    batch: tuple[Any, ...],
    optimizer: Callable[..., Any] = torch.optim.AdamW,
) -> Made:
    """Return a step that minimizes `loss_of(model, *batch)`, and what it is traced with."""
    one = optimizer(model.parameters(), lr=1e-3)

    def step(*given: torch.Tensor) -> torch.Tensor:
        one.zero_grad()
        loss = loss_of(model, *given)
        loss.backward()
        one.step()
        return loss

    return step, model, one, batch


class Net(nn.Module):
    """An embedding and two layers, for steps that say the rest themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(64, WIDTH)
        self.table = nn.Parameter(torch.randn(64, WIDTH))
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)


def words(length: int, rows: int = ROWS) -> torch.Tensor:
    """Return ids other than 0, i64[rows, length]."""
    return torch.randint(1, WORDS, (rows, length))


def vectors(length: int, rows: int = ROWS) -> torch.Tensor:
    """Return data, f32[rows, length, WIDTH]."""
    return torch.randn(rows, length, WIDTH)


def labels(*shape: int) -> torch.Tensor:
    """Return classes, i64[shape]."""
    return torch.randint(0, CLASSES, shape)


def pooled(pool: Callable[..., torch.Tensor]) -> Callable[[int], Made]:
    """Return what makes a classifier: `pool(model, x, mask)` gives one vector a row."""

    def make(length: int) -> Made:
        def loss_of(m: Any, x: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(m.head(pool(m, torch.tanh(m.mix(x)), mask)), y)

        mask = torch.ones(ROWS, length)
        return training(Net(), loss_of, (vectors(length), mask, labels(ROWS)))

    return make


def tagged(loss_of: Callable[..., torch.Tensor]) -> Callable[[int], Made]:
    """Return what makes a tagger: `loss_of(model, ids, mask, labels)`."""

    def make(length: int) -> Made:
        batch = words(length), torch.ones(ROWS, length), labels(ROWS, length)
        return training(Net(), loss_of, batch)

    return make


POOLED = (({1: 0}, 0.0), ({1: 0}, 0.0), None)
TAGGED = (({1: 0}, 0.0), ({1: 0}, 0.0), ({1: 0}, -100.0))
