# SPDX-License-Identifier: Apache-2.0
"""What a step computes from a tensor of its closure and reads in Python follows that tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.capture.guards.objects import _has_same_bits

Output = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# What a step does with its outputs [6, 4] and the labels of its closure, int64[6].
READS: dict[str, Output] = {
    "positions": lambda out, y: out[(y >= 1).nonzero().squeeze(1)],
    "a mask": lambda out, y: out[y >= 1],
    "where": lambda out, y: out * torch.where(y >= 1)[0].numel(),
    "a number": lambda out, y: out * float((y >= 1).sum().item()),
    "a branch": lambda out, y: out * (2 if (y >= 1).sum() > 3 else 5),
    "a selection": lambda out, y: out.masked_select((y >= 1)[:, None]),
    "a list": lambda out, y: out * sum(y.tolist()),
    "an array": lambda out, y: out * float(y.numpy().sum()),
    "an array of NumPy's": lambda out, y: out * float(np.asarray(y).sum()),
    "DLPack": lambda out, y: out * float(np.from_dlpack(y).sum()),
    "written copies": lambda out, y: out[torch.zeros(6).copy_(y).add_(1).ge_(2).bool()],
}


def losses(train: Callable[..., torch.Tensor], labels: torch.Tensor, count: int = 5) -> list[float]:
    found = []
    for k in range(count):
        generator = torch.Generator().manual_seed(k // 2)  # each value twice in a row
        labels.copy_(torch.randint(0, 3, labels.shape, generator=generator))
        found.append(float(train(torch.randn(6, 4, generator=generator))))
    return found


@pytest.mark.parametrize("name", READS)
def test_a_value_of_the_closure_is_read_again_where_it_changes(name: str) -> None:
    results, compilations = [], 0
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model, labels = nn.Linear(4, 4), torch.randint(0, 3, (6,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = READS[name](model(x), labels).square().mean()  # noqa: B023
            loss.backward()
            optimizer.step()  # noqa: B023
            optimizer.zero_grad()  # noqa: B023
            return loss.detach()

        train: Any = step
        if is_compiled:
            train = amp_ir.jit(step, model=model, optimizer=optimizer)
        results.append(losses(train, labels))
        compilations = len(train.recompiles) if is_compiled else 0
    # Float32 sums in another order, over five steps.
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    assert 1 <= compilations <= 2


def test_an_adaptive_softmax_takes_the_classes_of_its_closure() -> None:
    """Clusters of one row among them, whose positions are a tensor without axes."""
    results = []
    for is_compiled in (False, True):
        torch.manual_seed(1)
        model = nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10], div_value=1.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        classes = torch.randint(0, 20, (6,))

        def step(x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(x, classes).loss  # noqa: B023
            loss.backward()
            optimizer.step()  # noqa: B023
            optimizer.zero_grad()  # noqa: B023
            return loss.detach()

        train: Any = amp_ir.jit(step, model=model, optimizer=optimizer) if is_compiled else step
        found = []
        for k in range(4):
            generator = torch.Generator().manual_seed(k)
            classes.copy_(torch.randint(0, 20, (6,), generator=generator))
            found.append(float(train(torch.randn(6, 8, generator=generator))))
        results.append(found)
    assert results[1] == pytest.approx(results[0], rel=1e-5)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ([1.0, float("nan")], [1.0, float("nan")], True),
        ([0.0], [-0.0], False),
        ([1, 2], [1.0, 2.0], False),
        ([1, 2], [[1, 2]], False),
        ([1 + 2j], [1 + 2j], True),
        ([1 + 2j], [1 - 2j], False),
        ([True, False], [True, True], False),
        (3, 3, True),
    ],
)
def test_values_are_compared_by_their_bits(one: Any, other: Any, is_same: bool) -> None:  # noqa: FBT001
    assert _has_same_bits(torch.tensor(one), torch.tensor(other)) == is_same
