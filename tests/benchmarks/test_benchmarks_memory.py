# SPDX-License-Identifier: Apache-2.0
"""The benchmark of budgets says what was held, what is the least, and what it cost."""

from __future__ import annotations

import argparse

from benchmarks import memory


def test_budgets_are_held_or_the_least_is_told() -> None:
    chosen = argparse.Namespace(workloads=["bert1", "gpt2"], budgets=[0.8], layers=2, small=True)
    rows = {(row.workload, row.dtype): row for row in memory.measure_budgets(chosen)}
    assert set(rows) == {(name, d) for name in ("bert1", "gpt2 x 2") for d in memory.DTYPES}
    for (name, _), row in rows.items():
        # Of what is not state: that is there whatever is computed twice.
        assert row.budget == row.state + int(0.8 * (row.free - row.state))
        assert (row.planned is None) != (row.least is None)
        assert row.planned is None or row.planned <= row.budget
        assert row.least is None or row.budget < row.least <= row.free
        assert (row.milliseconds is not None) == (name == "bert1")
    deep = rows["gpt2 x 2", "bfloat16"]
    assert deep.planned is not None and deep.reruns > 0
    assert memory.budget_table(list(rows.values())).row_count == len(rows)
