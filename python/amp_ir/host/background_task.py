# SPDX-License-Identifier: Apache-2.0
"""A function that runs in a thread of its own, while the caller goes on.

The thread is joined when the interpreter ends: a compiler that runs while the process is torn down
would crash it. A fork waits for it too: locks that it holds would stay held in the child forever.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

# Steps that run meanwhile come first: a thread has a priority of its own on Linux.
_NICENESS = 5
# A fork goes on without a task that takes longer: it may need a lock that the forking thread holds.
_LONGEST_WAIT_SECONDS = 60.0

_running: dict[int, threading.Thread] = {}


class BackgroundTask(Generic[T]):
    """A function that was started in a thread; `result` waits for it.

    Args:
        function: called once, with the context variables of the caller. It must not need a lock
            that the caller holds while it waits.
        name: of the thread, after "amp_ir ".
        in_thread: False to call it at once instead, in the caller's thread.
    """

    def __init__(self, function: Callable[[], T], name: str, *, in_thread: bool = True) -> None:
        self._function: Callable[[], T] | None = function
        self._result: list[T] = []
        self._error: Exception | None = None
        self._process = os.getpid()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=[self._run], name=f"amp_ir {name}")
        if not in_thread:
            self._call()
            return
        _running[id(self._thread)] = self._thread
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self._process != os.getpid() or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the function has returned or raised; Ctrl-C ends the wait, not the task."""
        if not self.is_done:
            self._thread.join()

    def result(self) -> T:
        """Wait, and return what the function returned.

        Raises:
            What the function raised.
            ChildProcessError: this process was forked while the function ran.
        """
        self.wait()
        if self._error is not None:
            raise self._error
        if not self._result:
            raise ChildProcessError("the process was forked while the thread ran")
        return self._result[0]

    def _run(self) -> None:
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # a system may keep all threads at one priority
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            self._call()
        finally:
            _running.pop(id(self._thread), None)

    def _call(self) -> None:
        function, self._function = self._function, None
        assert function is not None
        try:
            self._result.append(function())
        except Exception as error:
            self._error = error


def _wait_for_all() -> None:
    for thread in tuple(_running.values()):
        if thread is not threading.current_thread():
            thread.join(_LONGEST_WAIT_SECONDS)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_for_all)
