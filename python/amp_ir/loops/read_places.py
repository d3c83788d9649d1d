# SPDX-License-Identifier: Apache-2.0
"""Where the body of a loop value reads another, by the index that it reads at."""

from __future__ import annotations

import math
from typing import Any, Literal

from tvm import tirx
from tvm.tirx.analysis import undefined_vars

from amp_ir.loops.body_context import reading
from amp_ir.loops.ir import Element, Index, Pointwise, Value, compute_dtype


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


def order_of_memory(
    shape: tuple[int, ...], axes: tuple[int, ...], body: Element
) -> tuple[int, ...] | None:
    """Return another order of a reduction's dimensions, in which neighbours are so in memory too.

    None where they are in the given order, or in none. A matrix whose columns lie one after the
    other is summed over its rows like that: all columns are summed side by side.
    """
    kept = [d for d, n in enumerate(shape) if n > 1 and d not in axes]
    if not kept or len(shape) - 1 not in axes or shape[-1] == 1:
        return None
    if not _is_large_and_scattered(shape, body, tuple(range(len(shape)))):
        return None
    first = [d for d in range(len(shape)) if d not in axes and d != kept[-1]]
    order = (*first, *axes, kept[-1])
    return None if _is_large_and_scattered(shape, body, order) else order


def _is_large_and_scattered(shape: tuple[int, ...], body: Element, order: tuple[int, ...]) -> bool:
    """Return whether a body reads at least half as many elements as there are, not side by side."""
    index = tuple(tirx.Var(f"i{d}", "int32") for d in range(len(shape)))
    in_order = tuple(index[d] for d in order)
    found = False

    def note(value: Value, at: Index) -> Any:
        nonlocal found
        # The same elements in the same order are neighbours under another shape, too.
        if isinstance(value, Pointwise) and value.is_view and not value.is_reshape:
            return value.body(*at)
        found |= 2 * value.size >= math.prod(shape) and is_scattered(at, in_order)
        return tirx.Var("element", compute_dtype(value.dtype))

    with reading(note):
        body(*index)
    return found


def _is_next(i: Any, column: tirx.Var) -> bool:
    """Return whether an index is the column plus what is the same in a row."""
    if not isinstance(i, tirx.Add):
        return bool(i.same_as(column))
    parts = [part for part in (i.a, i.b) if column in _variables(part)]
    return len(parts) == 1 and _is_next(parts[0], column)


def _variables(i: Any) -> set[tirx.Var]:
    return set() if isinstance(i, int) else set(undefined_vars(i))
