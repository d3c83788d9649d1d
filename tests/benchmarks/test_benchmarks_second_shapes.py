# SPDX-License-Identifier: Apache-2.0
"""The benchmark of second shapes runs, and compiles the second one from the first one's kernels."""

from __future__ import annotations

import os

from benchmarks import second_shapes

from amp_ir.demo.workloads import WORKLOADS


def test_both_shapes_are_compiled_in_each_round():
    before = os.environ["AMP_IR_CACHE"]
    training = WORKLOADS["mlp"].make(small=True)
    other = second_shapes.other_shapes("mlp")["batch"](training.batch)
    assert [len(one) for one in other] == [6, 6]
    rows = second_shapes.compare(training, "bfloat16", other, rounds=2)
    assert list(rows) == ["first", "second", "quotient"]
    for row in rows.values():
        assert list(row) == list(second_shapes.FIELDS) and min(row.values()) > 0
    assert os.environ["AMP_IR_CACHE"] == before
