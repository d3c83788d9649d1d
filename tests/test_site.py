# SPDX-License-Identifier: Apache-2.0
"""The site builds without a warning: every link leads somewhere, every page is in the contents."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import amp_ir

SITE = Path(__file__).resolve().parents[1] / "docs" / "site"


@pytest.fixture(scope="module")
def write_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_pages", SITE / "write_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built(pages: Path, out: Path) -> subprocess.CompletedProcess[str]:
    options = ["-q", "-W", "--keep-going", "-b", "html", "-c", str(SITE)]
    command = [sys.executable, "-m", "sphinx", *options, str(pages), str(out)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_site_builds_and_its_links_lead_somewhere(write_pages, tmp_path):
    write_pages.main(tmp_path / "pages")
    done = built(tmp_path / "pages", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    written = tmp_path / "site"
    assert "cross_entropy" in (written / "refused" / "control_flow.html").read_text()
    assert "exp overflows float16" in (written / "policies.html").read_text()
    api = (written / "api.html").read_text()
    missing = [name for name in amp_ir.__all__ if f'id="amp_ir.{name}"' not in api]
    # Modules: that of errors and that for tests are on the page, with what is in them.
    assert set(missing) <= {"amp", "errors", "testing"}
    assert "IndexOutOfRangeError" in api and "assert_plan_matches" in api


def test_a_link_to_nothing_and_a_page_without_a_place_are_errors(tmp_path):
    (tmp_path / "index.md").write_text("# Start\n\n[a](nowhere.md) [b](other.md#nothing)\n")
    (tmp_path / "other.md").write_text("# Other\n")
    done = built(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    for words in ("'nowhere.md'", "'nothing'", "document isn't included in any toctree"):
        assert words in done.stderr


def test_links_lead_to_the_pages_of_what_they_name(write_pages):
    for link, expected in (
        ("../../python/amp_ir/pipeline.py", "../source/python/amp_ir/pipeline.py.md"),
        ("../guide.md#x", "../guide.md#x"),
        ("../../tutorials/01_first_step.py", "../tutorials/01_first_step.md"),
        ("../../README.md", "../index.md"),
    ):
        found = write_pages.with_links_to_pages("design/README.md", f"[a]({link})")
        assert found == f"[a]({expected})"


def test_a_lesson_is_prose_and_code(write_pages):
    text = '"""Lesson 1: begin."""\n\n# %% [markdown]\n# # Head\n#\n# Words.\n\n# %%\nx = 1\n'
    assert write_pages.lesson(text) == (
        "# Lesson 1: begin\n\n## Head\n\nWords.\n\n```python\nx = 1\n```\n"
    )
