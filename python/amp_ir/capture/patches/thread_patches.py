# SPDX-License-Identifier: Apache-2.0
"""Attributes of PyTorch that are replaced in the thread that captures, and unchanged in others."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

from amp_ir.capture.patches.restores import Restores

_ABSENT = object()


class ThisThread(threading.local):
    """A test of whether the calling thread is the one that made this object.

    A thread's number would not do: after a fork another thread may get it.
    """

    is_here = False

    def __init__(self) -> None:
        super().__init__()

    @classmethod
    def marked(cls) -> ThisThread:
        """Return one that is true in this thread."""
        made = cls()
        made.is_here = True
        return made


def here(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is `replacement` in this thread and `original` in every other."""
    this_thread = ThisThread.marked()

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return (replacement if this_thread.is_here else original)(*args, **kwargs)

    _ORIGINALS[function] = original
    return function


_ORIGINALS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def original_of(value: Any) -> Any:
    """Return what `here` replaced, where `value` is what it returned; else `value`."""
    return _ORIGINALS.get(value, value) if isinstance(value, FunctionType) else value


class ValueHere:
    """A class attribute with one value in this thread and another in every other.

    Instances and other threads may set their own over it, as over any class attribute.
    """

    def __init__(self, value: Any, elsewhere: Any) -> None:
        self._value = value
        self._elsewhere = elsewhere
        self._this_thread = ThisThread.marked()

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self._value if self._this_thread.is_here else self._elsewhere


def patch(restores: Restores, owner: Any, name: str, replacement: Any) -> None:
    """Set an attribute of a module or class until `restores` run.

    A value that another thread sets meanwhile stays.
    """
    before = vars(owner).get(name, _ABSENT)

    def restore() -> None:
        if vars(owner).get(name, _ABSENT) is not replacement:
            return
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    restores.add(restore)
    setattr(owner, name, replacement)


def patch_function(
    restores: Restores, owner: Any, name: str, replacement: Callable[..., Any]
) -> None:
    """Apply `patch` to a function of a module or a method of a class, in this thread only."""
    patch(restores, owner, name, here(replacement, getattr(owner, name)))


class _NotHere(logging.Filter):
    """A filter that drops the log records of this thread."""

    def __init__(self) -> None:
        super().__init__()
        self._this_thread = ThisThread.marked()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is logged."""
        return not self._this_thread.is_here


def silence(restores: Restores, name: str) -> None:
    """Drop this thread's records of a logger until `restores` run."""
    log, silent = logging.getLogger(name), _NotHere()
    restores.add(lambda: log.removeFilter(silent))
    log.addFilter(silent)
