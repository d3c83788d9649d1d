# SPDX-License-Identifier: Apache-2.0
"""Checks of a step that raise: `if not torch.isfinite(loss): raise ...`, and `assert`.

The values do not exist when a step is captured, but the branch is known: a call in which it is
taken ends there. The compiled step computes the condition, and refuses a call as the user's step
does, with the state as before.
"""

from __future__ import annotations

import ast
import builtins
import functools
import linecache
from pathlib import Path
from types import CodeType, FrameType

import attrs
import torch

from amp_ir.capture.locations import innermost_line
from amp_ir.ir.index_check import USERS_CHECK

_TORCH = str(Path(torch.__file__).parent) + "/"
_OURS = str(Path(__file__).parent.parent) + "/"
# PyTorch's files that check values; all others only stand between a read and our mode.
_CHECKING = ("nn/", "optim/", "distributions/", "functional.py", "__init__.py")
_MOST_TEXT = 120
_EXITS = ("sys.exit", "exit", "quit")


@attrs.frozen
class CheckedRead:
    """A read of a bool in a check: the value with which the step goes on, and what it does else."""

    wanted: bool
    message: str


def checked_read(frame: FrameType | None) -> CheckedRead | None:
    """Return the check that the read of a bool in this frame belongs to; None where it is none."""
    frame = reader_of(frame)
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


def reader_of(frame: FrameType | None) -> FrameType | None:
    """Return the frame that reads the value, whose read is being traced in `frame`."""
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
        if isinstance(one, ast.Assert) or (isinstance(one, ast.If) and _ends_the_call(one.body[-1]))
    )


def _ends_the_call(statement: ast.stmt) -> bool:
    """Return whether a statement raises, as `sys.exit(1)` does."""
    if isinstance(statement, ast.Raise):
        return True
    is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    return is_call and ast.unparse(statement.value.func) in _EXITS  # type: ignore[attr-defined]


def _checks_of(name: str) -> tuple[ast.If | ast.Assert, ...]:
    """Return the statements of a file that raise unless a condition holds."""
    return _parsed(name, "".join(linecache.getlines(name)))


def _atom(test: ast.expr, frame: FrameType) -> ast.expr | None:
    """Return the part of a test whose truth the frame asks for."""
    where = _positions(frame.f_code)
    if where is None:
        test = _without_not(test)
        return test if _is_one_read(test) else None
    at = frame.f_lasti // 2
    nodes = [node for node in ast.walk(test) if isinstance(node, ast.expr)]
    # A jump has the position of its statement; what it asks about was computed just before.
    for here in (where[at], where[at - 1]):
        for node in nodes:
            if here == (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset):
                return _without_not(node)
    return None


def _positions(code: CodeType) -> list[tuple[int | None, ...]] | None:
    """Return the lines and columns of each instruction; None where Python does not keep them.

    Python 3.10 does not, nor does a later one with -X no_debug_ranges.
    """
    positions = getattr(code, "co_positions", None)
    where = [] if positions is None else list(positions())
    return where if any(one[2] is not None for one in where) else None


# Expressions that may ask for the truth of more than their own value.
_SEVERAL_READS = (
    ast.BoolOp, ast.IfExp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp,
    ast.Tuple, ast.List, ast.Set, ast.Dict, ast.In, ast.NotIn, ast.Not,
)  # fmt: skip
_READING_NOTHING = frozenset({"abs", "len", "isinstance", "getattr", "hasattr"})


def _is_one_read(test: ast.expr) -> bool:
    """Return whether the only truth that a test asks for is that of its own value."""
    value = test
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == "bool":
        value = test.args[0] if len(test.args) == 1 else test
    for part in ast.walk(value):
        name = (
            part.func.id if isinstance(part, ast.Call) and isinstance(part.func, ast.Name) else ""
        )
        if (
            isinstance(part, _SEVERAL_READS)
            or (isinstance(part, ast.Compare) and len(part.ops) > 1)
            or (hasattr(builtins, name) and name not in _READING_NOTHING)
        ):
            return False
    return True


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
