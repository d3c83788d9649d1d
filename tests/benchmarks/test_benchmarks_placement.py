# SPDX-License-Identifier: Apache-2.0
"""The table of placements, in the shapes of a test."""

from __future__ import annotations

import io
import json

from benchmarks import placement
from rich.console import Console


def test_both_placements_of_a_workload_and_their_shares(tmp_path, capsys):
    placement.main(["bert1", "--small", "--layers", "1", "--results", str(tmp_path)])
    greedy, cut = json.loads((tmp_path / "placement.json").read_text())
    assert (greedy["placement"], cut["placement"]) == ("greedy", "cut")
    assert cut["alone_at_kernels"] == 0
    assert cut["cast_nbytes"] <= greedy["cast_nbytes"]
    assert cut["model_nbytes"] == cut["bound_nbytes"] <= greedy["model_nbytes"]
    (scaled,) = json.loads((tmp_path / "autocast_scaling.json").read_text())
    assert scaled["layers"] == 1
    assert scaled["bindings"] > 100
    assert scaled["autocast_seconds"] > 0
    text = (tmp_path / "placement.txt").read_text()
    assert text == capsys.readouterr().out
    assert "bert1, cut:" in text


def test_a_share_is_of_the_greedy_placement_of_the_same_workload():
    one = placement.Placed("a", "greedy", 3, 2, 1, 400, 100, 9, 9, "")
    rows = [one, placement.attrs.evolve(one, placement="cut", cast_nbytes=100)]
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(placement.table_of_placements(rows))
    line = console.export_text().splitlines()[-1].split()
    assert line[:2] == ["a", "cut"]
    assert [line[6], line[9]] == ["0.25", "0.40"]
