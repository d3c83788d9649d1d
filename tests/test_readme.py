# SPDX-License-Identifier: Apache-2.0
"""The README's Python examples run as they stand, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import torch

README = Path(__file__).resolve().parents[1] / "README.md"


def test_the_examples_of_the_readme_run(capsys) -> None:
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(examples) == 3
    names = {"batch": (torch.randn(128, 64), torch.randn(128, 8))}
    for example in examples:
        exec(compile(example, str(README), "exec"), names)
    assert names["train"](*names["batch"]).isfinite()
    printed = capsys.readouterr().out
    assert "relax.matmul" in printed
    assert "StepRecord(step=0, skipped=False, scale=65536.0" in printed
