# SPDX-License-Identifier: Apache-2.0
"""Putting things back after a capture, whatever happens in it: an error, or Ctrl-C at any moment.

A context manager alone does not hold that: an interrupt may come while it is entered or left. What
is changed for a capture therefore registers its way back *before* it is changed, and the outermost
frame of the capture goes over what is left.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from amp_ir.host.fork_safe_lock import ForkSafeLock

P = ParamSpec("P")
R = TypeVar("R")

# Captures change PyTorch for the whole process, so there is one at a time.
_one_capture = ForkSafeLock("a step was being captured")
_of_thread = threading.local()


class Restores:
    """Functions that put something back, to be called last first; calling one twice is harmless."""

    def __init__(self) -> None:
        self._pending: list[Callable[[], object]] = []

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, restore: Callable[[], object]) -> None:
        """Call `restore` in the end. To be added before the change is made."""
        self._pending.append(restore)

    def run(self, keep: int) -> None:
        """Call all but the first `keep`. One that is interrupted is called again.

        Raises:
            BaseException: the first that came in between, when all is done.
        """
        first: BaseException | None = None
        failed: Callable[[], object] | None = None
        while len(self._pending) > keep:
            restore = self._pending[-1]
            try:
                restore()
                del self._pending[-1:]
            except BaseException as error:
                first = first or error
                if restore is failed:
                    del self._pending[-1:]
                failed = restore
        if first is not None:
            raise first


def _current() -> Restores:
    found: Restores = vars(_of_thread).setdefault("restores", Restores())
    return found


@contextlib.contextmanager
def restoring() -> Iterator[Restores]:
    """Run what is added inside when it is left."""
    restores = _current()
    keep = len(restores)
    try:
        yield restores
    finally:
        restores.run(keep)


def alone(
    prepare: Callable[[Restores], None],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function that captures run in one thread at a time and leave nothing behind.

    `prepare(restores)` is called before it.
    """

    def decorate(capture: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(capture)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with _one_capture:
                restores = _current()
                keep = len(restores)
                try:
                    try:
                        prepare(restores)
                        return capture(*args, **kwargs)
                    finally:
                        restores.run(keep)
                finally:
                    # An interrupt may have come before the line above had begun.
                    restores.run(keep)

        return run

    return decorate
