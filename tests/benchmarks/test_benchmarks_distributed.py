# SPDX-License-Identifier: Apache-2.0
"""The benchmark of several ranks runs, and says what it measured."""

from __future__ import annotations

import pytest
import torch.multiprocessing
from benchmarks import distributed

import prepared_process


def test_ranks_are_timed_in_turns_and_their_exchange_is_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.multiprocessing, "spawn", prepared_process.spawn)
    ways = ("amp_ir", "eager")
    (row,) = distributed.measure(["mlp"], rounds=2, warmup=1, small=True, ways=ways)
    assert set(row.milliseconds) == set(ways) and min(row.milliseconds.values()) > 0
    # Two layers of 64, one of 8, and their biases.
    assert row.sent_nbytes >= 4 * (2 * 64 * 65 + 8 * 65)
    assert row.exposed_milliseconds > 0 and 0 <= row.hidden_share <= 1
    columns = [column.header for column in distributed.table_of([row]).columns]
    assert columns[3:6] == ["amp_ir", "eager", "torch.compile"]
