# SPDX-License-Identifier: Apache-2.0
"""A function in a thread of its own: its result and error, Ctrl-C, forks, the process's end."""

from __future__ import annotations

import contextvars
import os
import subprocess
import sys
import threading

import pytest

from amp_ir.host.background_task import BackgroundTask

SETTING: contextvars.ContextVar[str] = contextvars.ContextVar("SETTING", default="none")


@pytest.mark.parametrize("in_thread", [True, False])
def test_results_errors_and_context_variables_come_through(in_thread: bool) -> None:
    token = SETTING.set("the caller's")
    task = BackgroundTask(
        lambda: (SETTING.get(), threading.get_ident()), "reads", in_thread=in_thread
    )
    SETTING.reset(token)
    setting, thread = task.result()
    assert setting == "the caller's" and task.is_done
    assert (thread != threading.get_ident()) == in_thread
    failed = BackgroundTask(lambda: [][0], "fails", in_thread=in_thread)
    for _ in range(2):
        with pytest.raises(IndexError, match="list index out of range"):
            failed.result()


def test_an_interrupted_wait_leaves_the_task_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    task = BackgroundTask(goes_on.wait, "waits")

    def interrupted(_timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(task._thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            task.result()
    assert not task.is_done
    goes_on.set()
    assert task.result() is True


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_waits_for_the_task_and_the_child_has_its_result() -> None:
    goes_on = threading.Event()
    task = BackgroundTask(lambda: goes_on.wait(30) and "done", "waits")
    threading.Timer(0.2, goes_on.set).start()
    child = os.fork()
    if child == 0:
        os._exit(0 if task.is_done and task.result() == "done" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_task_that_a_fork_did_not_wait_for_is_lost_in_the_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("amp_ir.host.background_task._LONGEST_WAIT_SECONDS", 0.01)
    goes_on = threading.Event()
    task = BackgroundTask(goes_on.wait, "waits")
    child = os.fork()
    if child == 0:
        try:
            task.result()
        except ChildProcessError as error:
            is_told = str(error) == "the process was forked while the thread ran"
            os._exit(0 if task.is_done and is_told else 1)
        os._exit(2)
    goes_on.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert task.result() is True


def test_a_process_ends_after_the_task() -> None:
    program = (
        "import time\n"
        "from amp_ir.host.background_task import BackgroundTask\n"
        "BackgroundTask(lambda: (time.sleep(0.3), print('task')), 'prints')\n"
        "print('main', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"main\ntask\n", b"")
