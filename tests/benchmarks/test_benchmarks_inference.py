# SPDX-License-Identifier: Apache-2.0
"""The table of inference beside torch.autocast: a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import inference


def test_a_small_model_is_measured_and_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "not" / "there"
    inference.main(["resnet50", "--small", "--rounds", "2", "--results", str(folder)])
    rows = json.loads((folder / "inference.json").read_text())["rows"]
    assert [row["samples"] for row in rows] == [2, 1]
    for row in rows:
        assert row["error"] < 1e-2 and 0 < row["milliseconds"]
        assert row["nbytes"] < 0.52 * row["float32_nbytes"]
    assert "resnet50 bfloat16" in capsys.readouterr().out


def test_a_folder_that_cannot_be_made_is_refused_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="2"):
        inference.main(["--results", str(tmp_path / "file")])
    assert "argument --results: cannot be made: [Errno 17] File exists" in capsys.readouterr().err
