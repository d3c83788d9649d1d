# SPDX-License-Identifier: Apache-2.0
"""The tables of errors over seeds and of predicted gains, from rows that a test makes."""

from __future__ import annotations

import json

import attrs
import pytest
from benchmarks import advise, numerics, search
from benchmarks.page_section import with_section


def draws(*ratios: float) -> list[numerics.Draw]:
    return [
        numerics.Draw("T5", "bfloat16", seed, 1e-2 * ratio, 1.1e-2 * ratio, 1e-2)
        for seed, ratio in enumerate(ratios)
    ]


def test_a_row_has_the_mean_of_the_ratios_and_its_interval():
    row = numerics.table(draws(0.8, 1.25), "a machine").splitlines()[-1]
    # Logarithms +-0.223: their mean is 0, 1.96 times their deviation over sqrt(2) is 0.437.
    assert row == ("| T5 | 2 | 1.0e-02 | 1.1e-02 | 1.0e-02 | 1.00 | 0.65 to 1.55 | 0.80 to 1.25 |")


def test_the_section_of_a_page_is_replaced_and_nothing_else():
    page = f"# Page\n\n{numerics.HEADING}\nold\n\n## Next\n\nrest\n"
    text = with_section(page, numerics.HEADING, numerics.table(draws(1.0), "a machine"))
    assert text.startswith(f"# Page\n\n{numerics.HEADING}")
    assert text.endswith("|\n\n## Next\n\nrest\n")
    assert "old" not in text
    assert with_section(text, numerics.HEADING, numerics.table(draws(1.0), "a machine")) == text
    with pytest.raises(ValueError, match="has no section"):
        with_section("# Page\n", numerics.HEADING, "")


def test_rows_are_read_again_and_not_measured(tmp_path, capsys, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(attrs.asdict(one)) + "\n" for one in draws(1.0, 1.0)))
    monkeypatch.setattr(numerics, "measure", lambda *_: pytest.fail("measured again"))
    assert numerics.main(["T5", "--seeds", "2", "--rows", str(rows)]) == 0
    assert "| T5 | 2 |" in capsys.readouterr().out


def test_a_gain_is_compared_with_the_measured_one():
    row = advise.Row("mlp", 10.0, 12.0, 5.0, 5.0)
    assert row.error == pytest.approx(2.0 / 2.4 - 1)
    assert advise.shown(row).endswith("gain 2.00 / 2.40 (-17%)")


def test_predictions_are_a_table_that_rows_make_again(tmp_path, capsys):
    row = advise.Row("mlp", 10.0, 12.0, 5.0, 5.0, "a machine")
    assert "1 of 1 gains are within 20%. Measured on a machine." in advise.table([row])
    line = "| mlp | 10 | 12 | -17% | 5 | 5 | +0% | 2.00 | 2.40 | -17% |"
    assert advise.table([row]).splitlines()[-1] == line
    (tmp_path / "advise.json").write_text(json.dumps({"rows": [attrs.asdict(row)]}))
    assert advise.main(["--table", "--results", str(tmp_path)]) == 0
    assert "1 of 1 gains" in capsys.readouterr().out


def test_a_search_is_measured_beside_other_plans(tmp_path, capsys, monkeypatch):
    files = ["--results", str(tmp_path)]
    assert search.main(["overflow", "--seconds", "0", *files]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| over")]
    assert [line.split(" | ")[3] for line in lines] == [
        "autocast", "conservative", "found", "float32",
    ]  # fmt: skip
    assert "inf" in lines[0] and "inf" not in lines[2]
    monkeypatch.setattr(search, "measure", lambda *_, **_named: pytest.fail("measured again"))
    assert search.main(["--table", *files]) == 0
    assert lines[2] in capsys.readouterr().out


def test_a_found_plan_that_is_slower_than_one_within_the_budget_fails():
    plans = [search.Plan("conservative", 1e-3, 2.0, 4.0), search.Plan("found", 1e-3, 2.0, 5.0)]
    row = search.Row("T5", "bfloat16", 2e-3, 3, 1.0, "searched", "how", tuple(plans))
    assert row.slower_than == ["conservative"]
    assert attrs.evolve(row, budget=1e-4).slower_than == []
