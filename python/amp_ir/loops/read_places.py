# SPDX-License-Identifier: Apache-2.0
"""Where the body of a loop value reads another, by the index that it reads at."""

from __future__ import annotations

from typing import Any, Literal

from tvm import tirx
from tvm.tirx.analysis import undefined_vars

from amp_ir.loops.ir import Index, Value


def place_of(
    value: Value, at: Index, index: Index, shape: tuple[int, ...]
) -> Literal["same", "broadcast", "other"]:
    """Return `Read.place` of a read of `value` at `at` by a value of `shape`."""
    offset = len(index) - len(value.shape)
    if offset < 0:
        return "other"
    for d, i in enumerate(at):
        if value.shape[d] == 1:
            continue
        if not (isinstance(i, tirx.Var) and i.same_as(index[offset + d])):
            return "other"
    return "same" if value.shape == shape else "broadcast"


def is_scattered(at: Index, index: Index) -> bool:
    """Return `Read.is_scattered` of a read at `at`."""
    if not index:
        return False
    column, variables = index[-1], [(i, _variables(i)) for i in at]
    if any(not found.issubset(index) for _, found in variables):
        return True  # an element of ids
    moving = [i for i, found in variables if column in found]
    if len(moving) == 1 and moving[0] is at[-1]:
        return not _is_next(at[-1], column)
    return bool(moving)


def _is_next(i: Any, column: tirx.Var) -> bool:
    """Return whether an index is the column plus what is the same in a row."""
    if not isinstance(i, tirx.Add):
        return bool(i.same_as(column))
    parts = [part for part in (i.a, i.b) if column in _variables(part)]
    return len(parts) == 1 and _is_next(parts[0], column)


def _variables(i: Any) -> set[tirx.Var]:
    return set() if isinstance(i, int) else set(undefined_vars(i))
