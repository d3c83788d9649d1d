# SPDX-License-Identifier: Apache-2.0
"""The walk-throughs of docs/design: a copy of the package, changed so, does what they say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DESIGN = ROOT / "docs" / "design"
# What to run in the changed copy, after the scripts of the page: selections of its tests.
CASES = {
    "add_an_op.md": ["tests/dialect/test_dialect_kernels.py", "-k", "logit or every_op"],
    "add_a_pass.md": ["tests/rewrites/test_drop_double_negation.py"],
}


def blocks_of(text: str) -> list[tuple[str, str]]:
    """The language and the text of each code block, in order."""
    return re.findall(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def patched(source: str, change: str) -> str:
    """`source` with one change made; what it names must be there exactly once."""
    lines = change.split("@@\n", 1)[1].splitlines()
    old = "\n".join(line[1:] for line in lines if line[:1] in (" ", "-")) + "\n"
    new = "\n".join(line[1:] for line in lines if line[:1] in (" ", "+")) + "\n"
    places = [
        found.start() for found in re.finditer(f"^(?={re.escape(old)})", source, re.MULTILINE)
    ]
    assert len(places) == 1, f"not there exactly once:\n{old}"
    return source[: places[0]] + new + source[places[0] + len(old) :]


def follow(page: Path, root: Path) -> list[Path]:
    """Make the changes of a page below `root`; return the scripts that it runs."""
    scripts = []
    for language, text in blocks_of(page.read_text()):
        if language == "diff":
            path = root / re.match(r"--- a/(\S+)\n\+\+\+ b/\1\n", text)[1]  # type: ignore[index]
            path.write_text(patched(path.read_text(), text))
        elif named := re.match(r"# (\S+\.py)\n", text):
            path = root / named[1]
            assert not path.exists(), f"{path} is there already"
            path.write_text(text)
            scripts += [path] if "/" not in named[1] else []
    return scripts


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the package and its tests, with the libraries that are built here."""
    skipped = shutil.ignore_patterns("lib", "__pycache__")
    for name in ("python", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=skipped)
    (tmp_path / "python/amp_ir/lib").symlink_to(ROOT / "python/amp_ir/lib")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def run(root: Path, *arguments: str) -> str:
    path = os.pathsep.join([str(root / "python"), str(root / "tests/support")])
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", CASES)
def test_a_walk_through_does_what_it_says(name: str, copied: Path) -> None:
    scripts = follow(DESIGN / name, copied)
    assert scripts
    where = run(copied, "-c", "import amp_ir; print(amp_ir.__file__)")
    assert where.startswith(str(copied / "python"))
    for script in scripts:
        run(copied, script.name)
    assert " passed" in run(copied, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CASES[name])


def test_a_change_is_made_where_its_context_is_and_only_there() -> None:
    assert patched("a\nb\n", "--- a/x\n+++ b/x\n@@\n a\n+c\n") == "a\nc\nb\n"
    assert patched("a\nb\n", "--- a/x\n+++ b/x\n@@\n-a\n+c\n") == "c\nb\n"
    with pytest.raises(AssertionError, match="exactly once"):
        patched("a\na\n", "--- a/x\n+++ b/x\n@@\n a\n+c\n")


def test_the_design_answers_each_question_in_three_hops() -> None:
    """Each row of the reader's test names three files, and each leads to the next."""
    text = (DESIGN / "README.md").read_text()
    rows = re.findall(r"^\| \d\. .*\|$", text, re.MULTILINE)
    assert len(rows) == 4
    for row in rows:
        hops = re.findall(r"`([^`]+)`", row.split("|")[2])
        assert hops[0] == "README.md" and len(hops) == 3, row
        for source, target in zip(hops, hops[1:], strict=False):
            assert (ROOT / target).exists()
            assert Path(target).name in (ROOT / source).read_text(), f"{source} names no {target}"
