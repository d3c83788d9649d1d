# SPDX-License-Identifier: Apache-2.0
"""README and the pages of docs/: their Python examples run, and what they name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from amp_ir.compat import mxnet

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# What the examples of each page print. Every page with examples that run has an entry.
PRINTED = {
    "README.md": [],
    "docs/coming_from_apex.md": [
        "0 (forward): float32 -> float16 for relax.matmul",
        "StepRecord(step=2, skipped=False, scale=65536.0",
    ],
    "docs/coming_from_mxnet.md": ["65536.0"],
    "docs/coming_from_r_torch.md": ["65536.0"],
    "docs/coming_from_raf.md": ["AMP (MBs): ", "this page asks for it"],
    "docs/coming_from_torch_amp.md": ["StepRecord(step=5, skipped=False"],
    "docs/compile_cache.md": ["built"],
    "docs/frozen.md": ["entry 'penalty' of global 'settings'", "Read from param_groups"],
    "docs/gpu.md": ["sm_90"],
    "docs/guide.md": ["relax.matmul", "{'epoch': 1}"],
    "docs/inference.md": ["ConvertedModel(2 programs", "R.function"],
    "docs/integrations.md": [],
    "docs/lengths.md": ["2 programs", "elements are averaged over axis 1 of ids, padding included"],
    "docs/loss_scaling.md": [
        "StepRecord(step=0, skipped=False, scale=65536.0",
        "An infinity is made by the cast float32 -> float16 for relax.matmul",
        "call scaler.unscale_(optimizer) before this line",
    ],
    "docs/memory.md": ["peak"],
    "docs/numerics.md": ["amp_ir low, strict", "The numbers are right."],
    "docs/troubleshooting.md": [
        "A NaN in the batch: batch0 (float32) holds it before the step.",
        "An infinity is made by the cast float32 -> float16 for relax.matmul (float16) in 2",
        "roofline",
        "in all, ",
        "peak",
        "The numbers are right.",
    ],
    "docs/plans.md": ["relax.matmul", "this example asks for it"],
    "docs/profiling.md": ["optimizer"],
}
README_LINES = 120
# Paths that a page may name although the tree does not hold them: what the reader makes or has.
MADE = {"step.so", "step.so.json", "state.npz", "train.py", "plan.json", "run.pt", "step.json"}
MADE |= {"dist/", "steps.zip", "report.html", ".venv/bin/pytest"}
MADE |= {"old.json", "new.json", "tests/golden_plan.json"}
SUFFIXES = r"py|md|cc|h|json|txt|npz|so|pt|html|toml|cmake"
# Where a page may leave off the start of a path.
FOLDERS = ("", "python/amp_ir", "python", "tests", "docs", "src", "benchmarks/results")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def examples_of(text: str) -> list[str]:
    """The Python blocks of a page that are not the text of a file ("# name.py" comes first)."""
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for block in blocks if not re.match(r"# \S+\.py\n", block)]


def missing_links(page: Path, text: str) -> list[str]:
    """The relative links of a page whose file is not there."""
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)", text)
    return [link for link in links if not (page.parent / link).exists()]


def missing_paths(text: str) -> list[str]:
    """The paths in code spans of a page, and those that its commands read, that are not there."""
    spans = [word for span in re.findall(r"`([^`\n]+)`", text) for word in span.split()]
    words = [re.sub(r"::.*|[,;:.]+$", "", word) for word in spans]
    is_path = re.compile(rf"[\w.-]+(/[\w.-]+)*(/|\.({SUFFIXES}))|[\w.-]+(/[\w.-]+)+")
    paths = [word for word in words if is_path.fullmatch(word) and not word.startswith(".")]
    return [
        path
        for path in paths
        if path not in MADE and not any((ROOT / folder / path).exists() for folder in FOLDERS)
    ]


# The pages of docs/refused show errors; tests/test_refused_pages.py runs them.
WITH_EXAMPLES = [
    page for page in PAGES if page.parent.name != "refused" and examples_of(page.read_text())
]


def test_the_pages_with_examples_are_those_whose_output_is_known() -> None:
    assert {name_of(page) for page in WITH_EXAMPLES} == set(PRINTED)


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=name_of)
def test_the_examples_of_a_page_run(
    page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # In a folder of its own: an example may write files.
    monkeypatch.chdir(tmp_path)
    # MXNet's init is for the process.
    monkeypatch.setattr(mxnet, "_settings", mxnet._Settings())
    names: dict[str, object] = {"__name__": "example"}
    for example in examples_of(page.read_text()):
        exec(compile(example, str(page), "exec"), names)
    loss = names.get("loss")
    assert loss is None or loss.isfinite()  # type: ignore[attr-defined]
    printed = capsys.readouterr().out
    for expected in PRINTED[name_of(page)]:
        assert expected in printed


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_links_to_and_names_exists(page: Path) -> None:
    text = page.read_text()
    assert not missing_links(page, text)
    assert not missing_paths(text)


def test_missing_links_and_paths_are_found() -> None:
    text = "[a](docs/guide.md) [b](docs/none.md#x) `tests/none.py::test` `amp/type_hints.py` `a/b`"
    assert missing_links(ROOT / "README.md", text) == ["docs/none.md"]
    assert missing_paths(text) == ["tests/none.py", "a/b"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_tables_of_a_page_are_whole(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
        assert len(widths) == 1, table
        assert re.fullmatch(r"\|(?:-+\|)+", table.splitlines()[1]), table


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES
