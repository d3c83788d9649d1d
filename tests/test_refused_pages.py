# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/refused: each message is the one they show, and each repair works."""

from __future__ import annotations

import linecache
import re
from pathlib import Path

import pytest

from amp_ir import errors

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "refused"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.stem != "README")
# What the messages call the file of an example.
FILE = "train.py"


def blocks(text: str) -> list[tuple[str, str]]:
    """The Python programs of a page, each with the message below it, or ""."""
    fenced = re.findall(r"^```(python|text)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    kinds = [*(kind for kind, _ in fenced[1:]), ""]
    return [
        (content, fenced[number + 1][1] if kinds[number] == "text" else "")
        for number, (kind, content) in enumerate(fenced)
        if kind == "python"
    ]


def run(source: str, names: dict[str, object]) -> None:
    # Errors look up the lines of a file.
    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
    exec(compile(source, FILE, "exec"), names)


def matches(pattern: str, message: str) -> bool:
    """Equal but for where lines break; "..." stands for what differs between machines."""
    wanted = ".+?".join(re.escape(part) for part in " ".join(pattern.split()).split("..."))
    return re.fullmatch(wanted, " ".join(message.split())) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_what_is_refused_and_what_works(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "train"}
    programs = blocks(page.read_text())
    assert any(message for _, message in programs) and not programs[-1][1]
    for source, expected in programs:
        if not expected:
            run(source, names)
            continue
        with pytest.raises(errors.AmpIrError) as caught:
            run(source, names)
        message = f"{type(caught.value).__name__}: {caught.value}"
        assert matches(expected, message), message


def test_messages_are_compared_as_a_whole():
    assert matches("a ... of\n  three", "a b c of three")
    assert not matches("a b", "a b c") and not matches("a ... c", "a bc")


def test_every_kind_of_error_is_in_the_list():
    listed = set(re.findall(r"`(\w+Error)`", (FOLDER / "README.md").read_text()))
    kinds = [one for one in vars(errors).values() if isinstance(one, type)]
    assert {one.__name__ for one in kinds if issubclass(one, errors.AmpIrError)} <= listed | {
        "AmpIrError"
    }


def test_every_page_is_in_the_list():
    listed = set(re.findall(r"\]\((\w+)\.md\)", (FOLDER / "README.md").read_text()))
    assert listed == {page.stem for page in PAGES}
