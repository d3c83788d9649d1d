# SPDX-License-Identifier: Apache-2.0
"""The smaller last batch of an epoch is padded, with losses that are weighted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir
from amp_ir.errors import PaddingError

CLASSES = torch.tensor([1.0, 2.0, 0.5])
# (scores: f32[rows, 3], y: i64[rows], weights: f32[rows]) -> loss
LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "weighted rows": lambda z, y, w: (F.cross_entropy(z, y, reduction="none") * w).sum() / w.sum(),
    "weighted classes": lambda z, y, w: F.cross_entropy(z, y, weight=CLASSES),
    "smoothed": lambda z, y, w: F.cross_entropy(z, y, weight=CLASSES, label_smoothing=0.1),
    "weighted logits": lambda z, y, w: (
        F.binary_cross_entropy_with_logits(
            z,
            (y[:, None] == torch.arange(3)).float(),
            weight=w[:, None],
            pos_weight=CLASSES,
            reduction="sum",
        )
        / w.sum()
    ),
    "weighted squares": lambda z, y, w: (w * (z[:, 0] - y) ** 2).sum() / w.sum().clamp(min=1e-6),
    "weighted distances": lambda z, y, w: (
        (w / w.sum()) @ F.huber_loss(z[:, 1], y.float(), reduction="none")
    ),
}


def training(
    loss_of: Callable[..., torch.Tensor],
) -> tuple[nn.Module, Callable[..., Any], torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x), y, w)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step, optimizer


def batch_of(rows: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(rows, 4), torch.randint(0, 3, (rows,)), torch.rand(rows) + 0.1


PAD = {"x": 0.0, "y": -100, "w": 0.0}


@pytest.mark.parametrize(
    "buckets", [dict.fromkeys(PAD, {0: (16,)}), "auto"], ids=["one size", "auto"]
)
def test_weighted_losses_of_a_smaller_batch(buckets: Any) -> None:
    def loss_of(*given: torch.Tensor) -> torch.Tensor:
        return torch.stack([loss(*given) for loss in LOSSES.values()]).sum()

    torch.manual_seed(0)
    model, step, _ = training(loss_of)
    own, to_compile, optimizer = training(loss_of)
    own.load_state_dict(copy.deepcopy(model.state_dict()))
    train = amp_ir.jit(to_compile, model=own, optimizer=optimizer, buckets=buckets, pad=PAD)
    for rows in (16, 16, 9, 16, 11):
        batch = batch_of(rows)
        torch.testing.assert_close(train(*batch), step(*batch), rtol=1e-4, atol=2e-5)
    assert not train.recompiles  # one program for all batches
    for one, other in zip(own.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


LEAKS: dict[str, Callable[..., torch.Tensor]] = {
    "mean of weighted rows": lambda z, y, w: (F.cross_entropy(z, y, reduction="none") * w).mean(),
    "weights of padding": lambda z, y, w: F.mse_loss(z[:, 0], y.float(), weight=w + 1),
    "squares without weights": lambda z, y, w: F.mse_loss(z[:, 0], y.float()),
    "weights that are normalized": lambda z, y, w: (z[:, 0] ** 2 * w.softmax(0)).sum(),
    "weights over their mean": lambda z, y, w: (z[:, 0] ** 2 * (w / w.mean())).sum(),
}


@pytest.mark.parametrize("name", LEAKS)
def test_losses_that_see_padded_rows_are_refused(name: str) -> None:
    model, step, optimizer = training(LEAKS[name])
    buckets = dict.fromkeys(PAD, {0: (16,)})
    train = amp_ir.jit(step, model=model, optimizer=optimizer, buckets=buckets, pad=PAD)
    with pytest.raises(PaddingError, match=f":{LEAKS[name].__code__.co_firstlineno}: "):
        train(*batch_of(9))
