# SPDX-License-Identifier: Apache-2.0
"""The line that a terminal shows while a compilation takes long."""

from __future__ import annotations

import io
import sys
import threading
from typing import Any

import pytest
from rich.console import Console

from amp_ir.ir.stages import StageWatch, stage, watched, watching
from amp_ir.report import live_stage as shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal, outside of pytest, on which a compilation takes long at once.

    pytest sets `sys.stderr` when a test begins, so that each sets it itself.
    """
    made = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(shown, "_QUIET_UNDER", "no such module")
    monkeypatch.setattr(shown, "_PATIENCE", 0.0)
    monkeypatch.setattr(shown, "_REFRESH", 0.001)
    console = Console(file=made, force_terminal=True, width=80)
    monkeypatch.setattr(shown, "Console", lambda **_: console)
    return made


def wait_for(text: str, terminal: Terminal) -> bool:
    waiting = threading.Event()
    return any(text in terminal.getvalue() or waiting.wait(0.01) for _ in range(1000))


def test_the_stage_and_the_time_are_shown_and_removed(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    with shown.live_stage("step (train.py:3)"):
        with stage("dispatch", None, None):
            assert wait_for("amp_ir compiles step (train.py:3): dispatch, 0 s", terminal)
        with shown.live_stage("another one"), stage("vm", None, None):
            assert wait_for("amp_ir compiles step (train.py:3): vm", terminal)
    assert "another one" not in terminal.getvalue() and watched() is None
    # The last thing written erases the line.
    assert terminal.getvalue().endswith(("\x1b[2K", "\x1b[?25h"))


def test_nothing_is_shown_for_a_short_one(terminal: Terminal, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(shown, "_PATIENCE", 60.0)
    with shown.live_stage("step"):
        pass
    assert terminal.getvalue() == ""


def test_nothing_is_shown_in_another_thread(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    seen: list[Any] = []

    def work() -> None:
        with shown.live_stage("step"):
            seen.append(watched())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None] and terminal.getvalue() == ""


def test_nothing_is_shown_under_pytest_or_without_a_terminal() -> None:
    with shown.live_stage("step"):
        assert watched() is None


def test_a_watch_has_the_name_of_the_stage_that_runs() -> None:
    watch = StageWatch()
    with watching(watch):
        assert shown.line("it", watch, 3.4) == "amp_ir compiles it: begins, 3 s"
        with stage("memory", None, None):
            assert watch.name == "memory"
