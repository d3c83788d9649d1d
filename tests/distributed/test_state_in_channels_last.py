# SPDX-License-Identifier: Apache-2.0
"""Ranks that train a model in channels_last, whose optimizer's state may be split."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import amp_ir
from data_parallel import WORKLOADS, Training, batches
from rank_processes import ranks

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
]
SHARDS = (None, "optimizer", "gradients")


def trained(rank: int, form: torch.memory_format, shard: str | None) -> list[Any]:
    """Parameters, their strides, and the gathered momentum after three steps."""
    to_form = lambda model: model.to(memory_format=form)  # noqa: E731
    one: Training = WORKLOADS["resnet"][0](to_form)
    options: dict[str, Any] = {} if shard is None else {"shard": shard}
    train = amp_ir.jit(
        one.step, model=one.models, optimizer=one.optimizers, data_parallel=True, **options
    )
    for batch in batches("resnet", 3, rank):
        train(*batch)
    held = list(one.models[0].parameters())
    states = amp_ir.gather_state_dict(one.optimizers[0])["state"].values()
    values = [*held, *(value["momentum_buffer"] for value in states)]
    return [(tensor.stride(), tensor.detach().flatten().tolist()) for tensor in values]


def train_all(rank: int) -> list[list[Any]]:
    forms = (torch.contiguous_format, torch.channels_last)
    return [trained(rank, form, shard) for shard in SHARDS for form in forms]


def test_ranks_train_as_with_contiguous_parameters(tmp_path: Path) -> None:
    first, second = ranks(train_all, tmp_path)
    for usual, last in zip(first[::2], first[1::2], strict=True):
        for (_, wanted), (_, found) in zip(usual, last, strict=True):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted))
        assert last[0][0] == (27, 1, 9, 3) != usual[0][0]
    parameters = 7  # what each rank has as the other does
    assert [one[:parameters] for one in first] == [one[:parameters] for one in second]
