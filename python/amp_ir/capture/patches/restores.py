# SPDX-License-Identifier: Apache-2.0
"""Restoring state after a capture, whatever happens in it: an error, or Ctrl-C at any moment.

A context manager alone does not guarantee that: an interrupt may come on entry or exit. Every
change therefore registers its restore function *before* it is made, and the outermost frame of the
capture runs those that remain.
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
    """Functions that restore something, called in reverse order; calling one twice is harmless."""

    def __init__(self) -> None:
        self._pending: list[Callable[[], object]] = []

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, restore: Callable[[], object]) -> None:
        """Register `restore`; call this before the change is made."""
        self._pending.append(restore)

    def run(self, keep: int) -> None:
        """Call all but the first `keep`. One that is interrupted is called again.

        Raises:
            BaseException: the first one that interrupted, after all have run.
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
    """Run on exit what is added inside."""
    restores = _current()
    keep = len(restores)
    try:
        yield restores
    finally:
        restores.run(keep)


@contextlib.contextmanager
def between_captures() -> Iterator[None]:
    """Hold off captures in other threads, which put fakes and symbols into the user's objects."""
    with _one_capture:
        yield


def alone(
    prepare: Callable[[Restores], None],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function of captures run in one thread at a time and restore everything.

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
                    # An interrupt may have come before the line above ran.
                    restores.run(keep)

        return run

    return decorate
