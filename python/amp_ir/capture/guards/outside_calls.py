# SPDX-License-Identifier: Apache-2.0
"""Calls of Python that reach outside of the step: clocks, random numbers, addresses and files.

A compiled step would make them only when it is captured, and go on with what they gave then.
"""

from __future__ import annotations

import csv
import datetime
import genericpath
import glob
import multiprocessing
import os
import pathlib
import random
import time
from contextvars import ContextVar
from pathlib import Path
from types import BuiltinFunctionType, CodeType
from typing import Any

from amp_ir.ir.location import Location

RANDOM_FILES = frozenset(
    str(Path(random.__file__).with_name(name)) for name in ("random.py", "secrets.py", "uuid.py")
)
# Of their Python code, which holds a stream or a queue of C that the observer does not see.
STREAM_FILES = frozenset({str(Path(multiprocessing.__file__).with_name("queues.py")), csv.__file__})
_STREAM_METHODS = frozenset(
    {"put", "put_nowait", "get", "get_nowait", "writerow", "writerows", "writeheader", "__next__"}
)
_CLOCKS = frozenset(
    getattr(time, name)
    for name in dir(time)
    if isinstance(getattr(time, name), BuiltinFunctionType) and not name.endswith("sleep")
)
_NOW = ("now", "utcnow", "today")
_OPENS = frozenset({open, os.open, os.listdir, os.scandir, os.stat, os.lstat, os.access, os.remove})
# Functions of the standard library's own code; some of its Pythons have pathlib as a package.
_OF_FILES = frozenset(
    {"exists", "isfile", "isdir", "getsize", "getmtime", "getctime", "getatime", "is_file",
     "is_dir", "stat", "lstat", "iterdir", "glob", "iglob", "rglob", "open", "read_text",
     "read_bytes", "write_text", "write_bytes", "touch", "unlink", "mkdir"}
)  # fmt: skip
_FILE_MODULES = (
    "<frozen genericpath>",  # how Python 3.11 and later name its code
    genericpath.__file__, glob.__file__, pathlib.__file__.removesuffix("__init__.py"),
)  # fmt: skip
Diagnostic = tuple[str, Any, str]


def draw(what: str, where: Location) -> Diagnostic:
    """Return the diagnostic for a random number of Python's or NumPy's generators."""
    return (
        f"{what} draws a random number in Python, which a compiled step would do only when it is "
        "captured",
        where,
        "Draw it with torch (torch.rand), or outside of the step and pass it as an argument",
    )


def address(where: Location) -> Diagnostic:
    """Return the diagnostic for the address of a tensor's memory."""
    return (
        "data_ptr() reads an address, and no tensor has one while a step is captured",
        where,
        "To ask whether two parameters are one, write `a is b`",
    )


def clock(function: Any, owner: Any, called_at: str, where: Location) -> Diagnostic:
    """Return the diagnostic for a time of day; `called_at` says through which call it is read."""
    what = f"{getattr(owner, '__name__', 'time')}.{function.__name__}()"
    return (
        f"{what} reads the clock, which a compiled step would do only when it is captured"
        f"{called_at}",
        where,
        "Read it outside of the step",
    )


def file(name: str, where: Location) -> Diagnostic:
    """Return the diagnostic for a call that reads or writes files."""
    return (
        f"{name}() looks at files, which a compiled step would do only when it is captured",
        where,
        "Do it outside of the step, and pass what it gives as an argument",
    )


def stream(name: str, owner: object, where: Location) -> Diagnostic:
    """Return the diagnostic for a method that reads or writes a stream, or uses a queue."""
    return (
        f"{name}() of a {type(owner).__name__} acts outside of the step, which a compiled step "
        "would do only when it is captured",
        where,
        "Return from the step what is to be written or put, and do it after the call; read or take "
        "before it, and pass that as an argument",
    )


def variable(which: ContextVar[Any], where: Location) -> Diagnostic:
    """Return the diagnostic for a context variable that a step sets and does not reset."""
    return (
        f"sets the context variable {which.name!r}, which a compiled step would do only when it is "
        "captured",
        where,
        "Set it before the call or after it, or reset it in the step: token = variable.set(...), "
        "variable.reset(token)",
    )


def context(function: Any, where: Location) -> Diagnostic:
    """Return the diagnostic for code that a step runs in a context that was made before it."""
    return (
        f"{function.__name__}() of a Context reads context variables, and what they are there is "
        "not guarded",
        where,
        "Pass what they give as an argument, or call the step itself with context.run(step, ...)",
    )


def is_clock(function: Any, owner: Any) -> bool:
    """Return whether a builtin reads a clock."""
    if isinstance(owner, type) and issubclass(owner, datetime.date):
        return function.__name__ in _NOW
    return isinstance(function, BuiltinFunctionType) and function in _CLOCKS


def opens_files(function: Any) -> bool:
    """Return whether a builtin reads or writes files."""
    return isinstance(function, BuiltinFunctionType) and function in _OPENS


def is_of_files(file: str) -> bool:
    """Return whether a source file is the standard library's, with functions on files."""
    return file.startswith(_FILE_MODULES)


def moves_a_stream(code: CodeType) -> bool:
    """Return whether code of STREAM_FILES reads or writes a stream or uses a queue."""
    return code.co_name in _STREAM_METHODS


def looks_at_files(code: CodeType) -> bool:
    """Return whether code of such a source file reads or writes files."""
    return code.co_name in _OF_FILES
