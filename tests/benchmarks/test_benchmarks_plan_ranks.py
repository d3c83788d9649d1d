# SPDX-License-Identifier: Apache-2.0
"""The benchmark of planned ranks runs, and has both times of a step."""

from __future__ import annotations

import pytest
import torch.multiprocessing
from benchmarks import plan_ranks

import prepared_process


def test_a_planned_step_is_beside_the_measured_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.multiprocessing, "spawn", prepared_process.spawn)
    (row,) = plan_ranks.measure(["mlp"], rounds=2, small=True)
    assert row.ranks == 2 and row.gigabytes_per_second > 0
    assert 0 < row.planned_exposed_milliseconds < row.planned_milliseconds
    assert row.measured_milliseconds > 0 and row.error > -1
    columns = [column.header for column in plan_ranks.table_of([row]).columns]
    assert columns[5:8] == ["step", "planned", "error"]
