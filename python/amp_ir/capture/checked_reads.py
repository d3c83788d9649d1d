# SPDX-License-Identifier: Apache-2.0
"""Checks of a step that raise: `if not torch.isfinite(loss): raise ...`, and `assert`.

The values do not exist when a step is captured, but the branch is known: a call in which it is
taken ends there. The compiled step computes the condition, and refuses a call as the user's step
does, with the state as before.
"""

from __future__ import annotations

import ast
import functools
import linecache
from pathlib import Path
from types import FrameType

import attrs
import torch

from amp_ir.capture.locations import innermost_line
from amp_ir.ir.index_check import USERS_CHECK

_TORCH = str(Path(torch.__file__).parent) + "/"
_OURS = str(Path(__file__).parent.parent) + "/"
# PyTorch's files that check values; all others only stand between a read and our mode.
_CHECKING = ("nn/", "optim/", "distributions/", "functional.py", "__init__.py")
_MOST_TEXT = 120


@attrs.frozen
class CheckedRead:
    """A read of a bool in a check: the value with which the step goes on, and what it does else."""

    wanted: bool
    message: str


def checked_read(frame: FrameType | None) -> CheckedRead | None:
    """Return the check that the read of a bool in this frame belongs to; None where it is none."""
    frame = _reader(frame)
    if frame is None:
        return None
    name, line = frame.f_code.co_filename, frame.f_lineno
    for statement in _checks_of(name):
        if not statement.lineno <= line <= (statement.test.end_lineno or 0):
            continue
        goes_on_with = isinstance(statement, ast.Assert)
        atom = _atom(statement.test, frame)
        wanted = None if atom is None else _wanted(statement.test, atom, goes_on_with)
        if wanted is not None:
            return CheckedRead(wanted, _message(statement, frame))
    return None


def _reader(frame: FrameType | None) -> FrameType | None:
    """Return the frame that reads the value."""
    while frame is not None:
        name = frame.f_code.co_filename
        is_between = name.startswith(_TORCH) and not name[len(_TORCH) :].startswith(_CHECKING)
        if not (name.startswith((_OURS, "<")) or is_between):
            return frame
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=256)
def _parsed(name: str, _text: str) -> tuple[ast.If | ast.Assert, ...]:
    try:
        tree = ast.parse(_text)
    except SyntaxError:  # a notebook's cell with a magic command
        return ()
    return tuple(
        one
        for one in ast.walk(tree)
        if isinstance(one, ast.Assert)
        or (isinstance(one, ast.If) and isinstance(one.body[-1], ast.Raise))
    )


def _checks_of(name: str) -> tuple[ast.If | ast.Assert, ...]:
    """Return the statements of a file that raise unless a condition holds."""
    return _parsed(name, "".join(linecache.getlines(name)))


def _atom(test: ast.expr, frame: FrameType) -> ast.expr | None:
    """Return the part of a test whose truth the frame asks for."""
    positions = getattr(frame.f_code, "co_positions", None)
    if positions is None:  # Python 3.10: a test of one part
        test = _without_not(test)
        return None if isinstance(test, ast.BoolOp) else test
    at, where = frame.f_lasti // 2, list(positions())
    nodes = [node for node in ast.walk(test) if isinstance(node, ast.expr)]
    # A jump has the position of its statement; what it asks about was computed just before.
    for here in (where[at], where[at - 1]):
        for node in nodes:
            if here == (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset):
                return _without_not(node)
    return None


def _without_not(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        node = node.operand
    return node


def _wanted(node: ast.expr, atom: ast.expr, wanted: bool) -> bool | None:  # noqa: FBT001
    """Return the value of `atom` with which `node` is `wanted`, whatever its other parts are."""
    if node is atom:
        return wanted
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _wanted(node.operand, atom, not wanted)
    if isinstance(node, ast.BoolOp):
        # `a and b` is False with `b`, but with `a` alone it need not be checked.
        decides_alone = isinstance(node.op, ast.And) != wanted
        for value in node.values[-1:] if decides_alone else node.values:
            found = _wanted(value, atom, wanted)
            if found is not None:
                return found
    return None


def _message(statement: ast.If | ast.Assert, frame: FrameType) -> str:
    raised = statement if isinstance(statement, ast.Assert) else statement.body[-1]
    source = ast.unparse(raised)
    line = _users_line(frame)
    text = source if len(source) <= _MOST_TEXT else source[: _MOST_TEXT - 3] + "..."
    return f"{USERS_CHECK}: {text} ({line})"


def _users_line(frame: FrameType) -> str:
    name, line, _ = innermost_line(frame)
    return f"{Path(name).name}:{line}" if name else "in PyTorch"
