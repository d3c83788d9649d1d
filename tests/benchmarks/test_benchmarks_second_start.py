# SPDX-License-Identifier: Apache-2.0
"""The benchmark of second starts: what it compares, in the shapes of a test."""

from __future__ import annotations

from benchmarks import second_start


def test_a_second_start_is_loaded_and_set_beside_the_first():
    rows = second_start.compare("mlp", "bfloat16", small=True, rounds=1)
    kinds = ["second start", "after an edit"]
    assert list(rows) == ["empty cache", *kinds, *(f"{kind} /" for kind in kinds)]
    for row in rows.values():
        assert list(row) == list(second_start.FIELDS) and min(row.values()) > 0
    for kind in kinds:
        for name, quotient in rows[f"{kind} /"].items():
            assert quotient == rows[kind][name] / rows["empty cache"][name]
