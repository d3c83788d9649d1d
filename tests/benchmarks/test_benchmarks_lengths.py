# SPDX-License-Identifier: Apache-2.0
"""The benchmark of batches of every length runs, and counts what it says."""

from __future__ import annotations

import pytest
from benchmarks import lengths


@pytest.mark.parametrize("model", lengths.MODELS)
def test_each_size_is_compiled_once(model):
    ours, eager = lengths.measure(model, 12, small=True, ways=("amp_ir", "eager"))
    assert (ours.way, eager.way) == ("amp_ir", "eager")
    assert ours.programs == 2 and eager.programs is None
    assert ours.arena_nbytes and ours.over_full
    columns = [column.header for column in lengths.table_of([ours, eager]).columns]
    assert columns[1:4] == ["model", "steps", "programs"]
