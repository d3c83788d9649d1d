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
    monkeypatch.setattr("rich.console.Console", lambda **_: console)
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


def test_long_stages_are_lines_of_the_log_where_there_is_no_terminal(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    said = [f"amp_ir compiles step (train.py:3): {one}, 0 s" for one in ("begins", "vm", "vm")]
    waiting = threading.Event()

    def logged(count: int) -> bool:
        return any(caplog.messages == said[:count] or waiting.wait(0.01) for _ in range(1000))

    with caplog.at_level("INFO", "amp_ir"), shown.live_stage("step (train.py:3)"):
        assert logged(1)
        with stage("vm", None, None):
            # Once a stage, and once more for another one of the same name.
            assert logged(2) and not waiting.wait(0.05)
        with stage("vm", None, None):
            assert logged(3)
    assert {one.name for one in caplog.records} == {"amp_ir.recompiles"}
    assert terminal.getvalue() == ""


def test_short_stages_and_silent_loggers_log_nothing(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with shown.live_stage("step"):
        assert watched() is None  # the logger's level is WARNING
    monkeypatch.setattr(shown, "_PATIENCE", 60.0)
    with caplog.at_level("INFO", "amp_ir"), shown.live_stage("step"), stage("vm", None, None):
        pass
    assert not caplog.messages


def test_nothing_is_shown_under_pytest() -> None:
    with shown.live_stage("step"):
        assert watched() is None


def test_a_watch_has_the_name_of_the_stage_that_runs() -> None:
    watch = StageWatch()
    with watching(watch):
        assert shown.line("it", watch, 3.4) == "amp_ir compiles it: begins, 3 s"
        with stage("memory", None, None):
            assert watch.name == "memory"
