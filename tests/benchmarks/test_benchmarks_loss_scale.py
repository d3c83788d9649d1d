# SPDX-License-Identifier: Apache-2.0
"""The benchmark of loss scaling measures what it says, at the shapes of a test."""

from __future__ import annotations

from benchmarks import loss_scale


def test_a_cost_is_of_steps_that_were_all_made():
    cost = loss_scale.measure("mlp", "bfloat16", rounds=2, small=True)
    assert cost.skips == 0
    assert min(*cost.ours, *cost.torch, cost.ours_ratio, cost.torch_ratio) > 0
    table = loss_scale.table_of([cost])
    assert table.row_count == 1
    assert [str(column.header) for column in table.columns][-1] == "skips"
