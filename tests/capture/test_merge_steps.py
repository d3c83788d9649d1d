# SPDX-License-Identifier: Apache-2.0
"""Entries of one tensor that a step reads one by one: their stacks, and their gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

from step_comparison import Training, assert_trains_alike, normal

ROWS, STEPS, WIDTH = 3, 5, 4


def weighted(parts: list[torch.Tensor]) -> torch.Tensor:
    return sum(((one.sin() * (k + 1)).sum() for k, one in enumerate(parts)), torch.zeros(()))


# What is computed of x [rows, steps, width], and how often the step then concatenates.
PROGRAMS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "all entries": (lambda x: weighted([x[:, k] for k in range(STEPS)]), 1),
    "a part": (lambda x: weighted([x[:, k] for k in (1, 2, 3)]), 2),
    "with gaps": (lambda x: weighted([x[:, k] for k in (-1, 1)]), 1),
    "one twice": (lambda x: weighted([x[:, k] for k in (0, 1, 2, 3, 4, 1)]), 1),
    "one": (lambda x: weighted([x[:, 2]]), 0),
    "of two axes": (lambda x: weighted([x[:, 0], x[:, 1], x[0], x[2]]), 3),
    "of the last axis": (lambda x: weighted([x[..., k] for k in range(WIDTH)]), 1),
    "of entries": (lambda x: weighted([x[0, k] for k in range(STEPS)]), 0),
    "scalars": (lambda x: weighted([*map(x.mean((0, 2)).__getitem__, (0, 1, 3))]), 2),
    "unbound": (lambda x: weighted(list(x.unbind(1))), 1),
    "stacked": (lambda x: torch.stack([x[:, k] for k in range(STEPS)]).sin().sum(), 0),
    "stacked elsewhere": (
        lambda x: torch.stack([x[:, k] for k in (1, 2, 3)], -1)[..., 0].sin().sum(), 1,
    ),
    "stacked in another order": (
        lambda x: weighted(list(torch.stack([x[:, k] for k in (2, 1, 0)], 1))), 4,
    ),
    "joined": (lambda x: torch.cat([x[:, k] for k in range(STEPS)], 1)[:, 2:7].sin().sum(), 1),
    "read elsewhere too": (lambda x: weighted([x[:, k] for k in range(STEPS)]) + x.cos().sum(), 1),
}  # fmt: skip


def training(program: Callable[[torch.Tensor], torch.Tensor]) -> Training:
    model = nn.Linear(WIDTH, WIDTH).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = program(model(x))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


def batch(index: int) -> tuple[torch.Tensor, ...]:
    return (normal(index, ROWS, STEPS, WIDTH).double(),)


@pytest.mark.parametrize("name", PROGRAMS)
def test_entries_train_as_in_eager(name: str) -> None:
    program, count = PROGRAMS[name]
    # float64: sums in another order.
    assert assert_trains_alike(lambda: training(program), batch, rtol=1e-11, atol=1e-12) == 1
    ops = Counter(
        str(node.target) for node in training(program).capture(batch(0)).graph.graph.nodes
    )
    assert ops["aten.cat.default"] == count
    assert ops["aten.select_backward.default"] == 0


def test_entries_far_apart_take_no_more_ops_than_near_ones() -> None:
    """The first and the last of a sequence, as a classifier reads them: the gap is one tensor."""

    def count(steps: int) -> int:
        train = training(lambda x: weighted([x[:, 0], x[:, -1]]))
        return len(train.capture((normal(0, 1, steps, WIDTH).double(),)).graph.graph.nodes)

    assert count(3) == count(3000)
