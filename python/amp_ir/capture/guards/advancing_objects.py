# SPDX-License-Identifier: Apache-2.0
"""Random generators and iterators: every use advances them, and a compiled step would not."""

from __future__ import annotations

import functools
import io
import queue
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Any

import attrs
import numpy


@attrs.frozen(eq=False)
class Advancing:
    """An object, its state when the step reached it, and a function that resets it if possible."""

    name: Callable[[], str]
    word: str
    position: Callable[[], Any]
    before: Any
    move_back: Callable[[], object] = lambda: None

    def has_moved(self) -> bool:
        """Return whether the step advanced it."""
        return bool(self.position() != self.before)


def advancing(value: Any, name: Callable[[], str]) -> Advancing | None:
    """Return the object as an advancing one; None for others, and where that cannot be detected."""
    position: Callable[[], Any]
    if isinstance(value, random.Random):
        state = value.getstate()
        back = functools.partial(value.setstate, state)
        return Advancing(name, "a random generator", value.getstate, state, back)
    if isinstance(value, numpy.random.Generator):
        bits: Any = value.bit_generator
        state = bits.state
        return Advancing(
            name,
            "a random generator",
            lambda: repr(bits.state),
            repr(state),
            lambda: setattr(bits, "state", state),
        )
    if isinstance(value, numpy.random.RandomState):
        whole = value.get_state()
        back = functools.partial(value.set_state, whole)
        position = functools.partial(_repr_of, value.get_state)
        return Advancing(name, "a random generator", position, repr(whole), back)
    if isinstance(value, io.IOBase):
        return None if _tell(value) is None or is_output(value) else _stream(value, name)
    if isinstance(value, queue.SimpleQueue):
        return Advancing(name, "a queue", value.qsize, value.qsize())
    if isinstance(value, Iterator):
        position = functools.partial(_position, value)
        return Advancing(name, "an iterator", position, position())
    return None


def _stream(value: Any, name: Callable[[], str]) -> Advancing:
    before = _tell(value)
    held = value.getvalue() if isinstance(value, (io.StringIO, io.BytesIO)) else None

    def move_back() -> None:
        if held is not None:
            value.seek(0)
            value.truncate()
            value.write(held)
        value.seek(before)

    return Advancing(name, "a stream", functools.partial(_tell, value), before, move_back)


def is_output(value: object) -> bool:
    """Return whether a stream is the output of the process."""
    return any(value is one for one in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__))


def _tell(value: Any) -> Any:
    try:
        return value.tell()
    except (OSError, ValueError):  # of a pipe, or of a closed file
        return None


def _repr_of(read: Callable[[], Any]) -> str:
    return repr(read())


def _position(iterator: Any) -> Any:
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, frame.f_lineno)
    try:
        with warnings.catch_warnings():
            # Iterators of itertools lose it in Python 3.14.
            warnings.simplefilter("ignore", DeprecationWarning)
            return repr(iterator.__reduce__())
    except TypeError:
        return None
