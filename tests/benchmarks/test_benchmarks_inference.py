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
    inference.main(["resnet50", "--small", "--rounds", "2", "--results", str(tmp_path)])
    rows = json.loads((tmp_path / "inference.json").read_text())["rows"]
    assert [row["samples"] for row in rows] == [2, 1]
    for row in rows:
        assert row["error"] < 1e-2 and 0 < row["milliseconds"]
        assert row["nbytes"] < 0.52 * row["float32_nbytes"]
    assert "resnet50 bfloat16" in capsys.readouterr().out
