# SPDX-License-Identifier: Apache-2.0
"""The tables of errors over seeds and of predicted gains, from rows that a test makes."""

from __future__ import annotations

import json

import attrs
import pytest
from benchmarks import advise, numerics, search


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
    text = numerics.with_section(page, numerics.table(draws(1.0), "a machine"))
    assert text.startswith(f"# Page\n\n{numerics.HEADING}")
    assert text.endswith("|\n\n## Next\n\nrest\n")
    assert "old" not in text
    assert numerics.with_section(text, numerics.table(draws(1.0), "a machine")) == text
    with pytest.raises(ValueError, match="has no section"):
        numerics.with_section("# Page\n", "")


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


def test_a_search_is_shown_beside_other_plans():
    lines = search.search(
        "overflow", search._parts("overflow", is_small=True), turns=1, seconds=0.0
    ).splitlines()
    assert lines[0].startswith("overflow in float16, budget 5.0e-03, 1 plans in ")
    assert [line.split()[0] for line in lines[1:]] == ["autocast", "found", "kept", "float32"]
    assert "error inf" in lines[1] and "error inf" not in lines[2]
