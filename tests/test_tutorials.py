# SPDX-License-Identifier: Apache-2.0
"""Every lesson runs as a reader would run it, and its asserts hold."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from prepared_process import run_program

LESSONS = sorted((Path(__file__).resolve().parents[1] / "tutorials").glob("[0-9][0-9]_*.py"))


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_lesson_runs(lesson: Path, tmp_path: Path) -> None:
    for package in re.findall(r"^(?:from|import) (lightning|accelerate)", lesson.read_text(), re.M):
        if find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed")
    # In a folder of its own: a lesson may write files.
    code, output = run_program(lesson, tmp_path)
    assert code == 0, output


def test_the_first_lesson_runs_in_a_python_that_has_imported_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error::UserWarning", str(LESSONS[0])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
