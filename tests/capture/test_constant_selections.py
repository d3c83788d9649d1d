# SPDX-License-Identifier: Apache-2.0
"""Selections whose size no input decides: SimCLR's loss, pairs above a diagonal, counts."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.errors import CaptureError, StateError


def contrastive_logits(features: torch.Tensor) -> torch.Tensor:
    """Return f32[2n, 2n - 1] of SimCLR, the positive first, by masks as it is often written."""
    n = len(features) // 2
    labels = torch.arange(n).repeat(2)
    same = labels.unsqueeze(0) == labels.unsqueeze(1)
    similar = features @ features.T
    itself = torch.eye(2 * n, dtype=torch.bool)
    same, similar = same[~itself].view(2 * n, -1), similar[~itself].view(2 * n, -1)
    positive, negative = similar[same].view(2 * n, -1), similar[~same].view(2 * n, -1)
    return torch.cat([positive, negative], dim=1)


def selections(features: torch.Tensor) -> torch.Tensor:
    """Return one number of many kinds of selections."""
    n = len(features)
    upper = torch.ones(n, n).triu(1)
    similar = features @ features.T
    counted = torch.unique_consecutive(torch.tensor([3, 3, 5]), return_counts=True)[1]
    written = features.clone()
    written[torch.arange(n) % 2 == 0, 1:] = features[torch.arange(n) % 2 == 1, 1:] * 2
    rows = torch.repeat_interleave(torch.arange(2), torch.tensor([n - 1, 1]))
    parts = [
        similar[upper.bool()].mean(),
        similar.masked_select(upper > 0).square().mean(),
        similar[torch.nonzero(upper, as_tuple=True)].std(),
        features[torch.where(torch.arange(n) % 3 == 0)[0]].mean(),
        sum(part.square().mean() for part in features[:3].split(counted.tolist())),
        written.square().mean(),
        features[rows].mean(),
    ]
    return torch.stack(parts).sum()


def test_selections_by_constants_train_as_in_eager() -> None:
    def losses(*, compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(5, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            features = nn.functional.normalize(model(x))
            target = torch.zeros(len(features), dtype=torch.long)
            loss = nn.functional.cross_entropy(contrastive_logits(features) * 5, target)
            loss = loss + selections(features)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = amp_ir.jit(step, model=model, optimizer=optimizer) if compiled else step
        x = torch.randn(6, 5)
        return [run(x), run(x), run(-x), *(one.detach() for one in model.parameters())]

    torch.testing.assert_close(losses(compiled=True), losses(compiled=False))


def test_a_mask_of_the_batch_still_decides_a_size() -> None:
    step = amp_ir.jit(lambda x: x[(x > 0) | torch.eye(3, dtype=torch.bool)][0], model=nn.ReLU())
    with pytest.raises(CaptureError, match=r"calls __getitem__ on what a mask selects, x\[mask\]"):
        step(torch.randn(3, 3))


ADJACENCY = (torch.rand(6, 6, generator=torch.Generator().manual_seed(3)) < 0.4).float()
TRAIN = torch.tensor([True, False, True, True, False, True])


def of_masked_nodes(x: torch.Tensor) -> torch.Tensor:
    """As the mask of a graph's nodes that are trained on."""
    return x[TRAIN].square().mean()


def of_edges(x: torch.Tensor) -> torch.Tensor:
    source, target = ADJACENCY.nonzero().t()
    return (x[source] * x[target]).mean()


def of_places(x: torch.Tensor) -> torch.Tensor:
    return x[torch.where(TRAIN)[0]].sum() + x[torch.nonzero(ADJACENCY[0])[:, 0]].mean()


@pytest.mark.parametrize("loss_of", [of_masked_nodes, of_edges, of_places])
def test_selections_by_tensors_from_outside_are_guards(
    loss_of: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def training() -> tuple[Callable[[torch.Tensor], float], nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(5, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> float:
            loss = loss_of(model(x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.item()

        return step, model, optimizer

    step, ours, optimizer = training()
    eager, theirs, _ = training()
    train = amp_ir.jit(step, model=ours, optimizer=optimizer)
    for k in range(4):
        if k == 2:  # another number of edges and nodes
            ADJACENCY[0] = 1 - ADJACENCY[0]
            TRAIN[1] = not TRAIN[1]
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(k))
        # Sums of some 20 numbers in float32, in another order.
        torch.testing.assert_close(train(x), eager(x), rtol=1e-5, atol=1e-6)
        pairs = [*ours.parameters()], [*theirs.parameters()]
        torch.testing.assert_close(*pairs, rtol=1e-5, atol=1e-6)
    assert len(train.recompiles) == 1


def test_a_sparse_tensor_from_outside_is_refused_by_its_name() -> None:
    adjacency = ADJACENCY.to_sparse()
    step = amp_ir.jit(lambda x: adjacency @ x, model=nn.ReLU())
    told = (
        "closure variable 'adjacency' of <lambda> (test_constant_selections.py) is sparse "
        "(torch.sparse_coo); only dense tensors can be captured, use .to_dense()"
    )
    with pytest.raises(StateError) as refused:
        step(torch.randn(6, 2))
    assert re.sub(r"\.py:\d+", ".py", str(refused.value)) == told
