# SPDX-License-Identifier: Apache-2.0
"""SyncBatchNorm on ranks computes what BatchNorm does on the batches of all ranks together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import amp_ir
from amp_ir.errors import ArgumentError
from rank_processes import ranks

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
]
State = dict[str, numpy.ndarray]
# Float32 rounds sums in another order, 2^-24 of each term; bfloat16 has 8 significant bits.
FULL, LOW = 5e-6, 5e-2
STEPS = 3


def training(*, synced: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    # One with the mean over all batches so far as its running statistics.
    last = nn.BatchNorm1d(4, momentum=None)
    model: nn.Module = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 4), last
    )
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if synced else model
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Batches of two sizes, whose statistics differ."""
    torch.manual_seed(10 * step + rank)
    count = 3 + rank
    return torch.randn(count, 3, 4, 4) * 2 + rank, torch.randint(0, 4, (count,))


def trained(rank: int, **options: Any) -> State:
    model, optimizer = training(synced=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        # The mean over two ranks of sums over samples.
        loss = F.cross_entropy(model(x), y, reduction="sum") * (2 / 7)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    train = amp_ir.jit(step, model=model, optimizer=optimizer, data_parallel=True, **options)
    for k in range(STEPS):
        train(*batch_of(rank, k))
    return {name: one.numpy().copy() for name, one in model.state_dict().items()}


def of_another_group() -> str:
    other = dist.new_group([0, 1])
    model = nn.Sequential(nn.SyncBatchNorm(3, process_group=other))
    with pytest.raises(ArgumentError) as caught:
        amp_ir.jit(model.forward, model=model, data_parallel=True)
    return str(caught.value)


def test_statistics_are_of_all_ranks(tmp_path: Path) -> None:
    model, optimizer = training(synced=False)
    for k in range(STEPS):
        x, y = (torch.cat(one) for one in zip(batch_of(0, k), batch_of(1, k), strict=True))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def program(rank: int) -> tuple[State, State]:
        assert of_another_group() == (
            "0 is a SyncBatchNorm of another process group than its model; convert it with the "
            "model's: SyncBatchNorm.convert_sync_batchnorm(model, process_group)"
        )
        low = trained(rank, amp_dtype="bfloat16", shard="optimizer")
        return trained(rank), low

    first, second = ranks(program, tmp_path)
    for ours, others, tolerance in zip(first, second, (FULL, LOW), strict=True):
        for name, expected in model.state_dict().items():
            assert (ours[name] == others[name]).all(), name
            scale = 0.1 + expected.abs().max()
            assert abs(ours[name] - expected.numpy()).max() < tolerance * scale, name
