# SPDX-License-Identifier: Apache-2.0
"""A lock on which a forked process does not wait forever."""

from __future__ import annotations

import os
import threading
from types import TracebackType

from amp_ir.errors import StateError


class ForkSafeLock:
    """A reentrant lock. Threads wait for each other; a forked child raises an error.

    A fork copies a lock that another thread holds, but not the thread, which would release it.

    Args:
        held_for: what happens while it is held, for the error: "a step was running".
    """

    def __init__(self, held_for: str) -> None:
        self._held_for = held_for
        self._lock = threading.RLock()
        self._process = os.getpid()

    def __enter__(self) -> None:
        """Take the lock.

        Raises:
            StateError: a thread of the parent held it while this process was forked.
        """
        if self._process == os.getpid():
            self._lock.acquire()
            return
        if not self._lock.acquire(blocking=False):
            raise StateError(
                f"{self._held_for} in another thread while this process was forked, and will not "
                "end here; fork between two steps, or start the process with the spawn method"
            )
        self._process = os.getpid()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release the lock."""
        self._lock.release()
