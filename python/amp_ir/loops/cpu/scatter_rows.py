# SPDX-License-Identifier: Apache-2.0
"""The gradient of a table on a CPU: the rows of each id are summed, and then added to the table.

Or kept as they are, where the table would be many times as large, and mostly zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.tirx import For, ForKind

from amp_ir.ir.row_loops import NUMBERS, ROW
from amp_ir.ir.vector_instructions import LANES
from amp_ir.loops import math as m
from amp_ir.loops.codegen.kernel_buffers import FlatBuffer, task_buffer
from amp_ir.loops.codegen.statements import sequence
from amp_ir.loops.ir import TensorSpec, compute_dtype
from amp_ir.loops.table_sum import TableSum

# Columns that one task adds up: few enough for parallel work, enough for whole cache lines.
_BLOCK = 4 * LANES
# Tasks that share the ids of some columns.
_PARTS = 16


def scatter_rows(table: TableSum) -> tirx.Stmt:
    """Emit the sums of a table, in time that its size has no part in where `base` is its memory.

    `first` has the first item of each id that occurs, `after` the next item of the same id, or -1.
    """
    reaches_all = table.reaches_all
    if not table.out.spec.size or (not table.items and reaches_all is None):
        return _started(table)
    first, after = _declare("first", table.height), _declare("after", table.items)
    statements = [tirx.AllocBuffer(first.buffer), _started(table)]
    if reaches_all is not None:
        statements.append(tirx.IfThenElse(reaches_all, _all_without(table, first), None))
    if table.items:
        statements += [
            tirx.AllocBuffer(after.buffer),
            _each_item(table, lambda _item, id_: first.store(id_, _none())),
            _linked(table, first, after),
            _summed(table, first, after, lambda _item, id_: id_),
        ]
    if reaches_all is not None:
        statements.append(tirx.IfThenElse(reaches_all, _of_none(table, first), None))
    return sequence(statements)


def sum_rows(table: TableSum, first: FlatBuffer) -> tirx.Stmt:
    """Emit the sum of the rows of each id at the place of its first item, which `first` has.

    `first` has -1 for an id that does not occur. `table.out` has a row for each item; that of a
    later item of an id is not written.
    """
    after = _declare("after", table.items)
    return sequence([
        _all_without(table, first),
        tirx.AllocBuffer(after.buffer),
        _linked(table, first, after),
        _summed(table, first, after, lambda item, _id: item),
    ])  # fmt: skip


def write_rows(
    rows: FlatBuffer, items: int, id_of: Callable[[Any], Any], table: FlatBuffer, width: int,
    combine: Callable[[Any, Any], Any],
) -> tirx.Stmt:  # fmt: skip
    """Emit `table[id_of(k)] = combine(table[id_of(k)], rows[k])` for all items k, in order.

    A task has some columns, for which it takes all items.
    """
    block = next((n for n in (_BLOCK, _BLOCK // 2, LANES) if width % n == 0), width)
    task, item, id_ = (tirx.Var(name, "int32") for name in ("task", "item", "id"))

    def put(column: Any) -> tirx.Stmt:
        inside = task * block + column
        to = id_ * width + inside
        return table.store(to, combine(table.load(to), rows.load(item * width + inside)))

    visited = tirx.SeqStmt([tirx.Bind(id_, id_of(item)), columns(0, block, put)])
    body = For(item, 0, items, ForKind.SERIAL, visited)
    kind = ForKind.PARALLEL if width > block else ForKind.SERIAL
    return For(task, 0, width // block, kind, body)


def _declare(name: str, count: int) -> FlatBuffer:
    return FlatBuffer.declare(TensorSpec((max(1, count),), "int32"), name)


def _none() -> Any:
    return tirx.const(-1, "int32")


def _all_without(table: TableSum, first: FlatBuffer) -> tirx.Stmt:
    """Emit that no id occurs; later each that does says so."""
    row = tirx.Var("row", "int32")
    return For(row, 0, table.height, ForKind.SERIAL, first.store(row, _none()))


def _of_none(table: TableSum, first: FlatBuffer) -> tirx.Stmt:
    """Emit NaN in the rows whose id does not occur."""
    rows, width, out = table.height, table.width, table.out
    row, column = tirx.Var(ROW, "int32"), tirx.Var("column", "int32")
    nan = m.constant(math.nan, compute_dtype(out.spec.dtype))
    put = For(column, 0, width, ForKind.SERIAL, out.store(row * width + column, nan))
    body = tirx.IfThenElse(first.load(row) < 0, put, None)
    return For(row, 0, rows, ForKind.PARALLEL, body)


def _started(table: TableSum) -> tirx.Stmt:
    """Emit zeros, or the copy of `base` where that is other memory, as only the kernel knows."""
    rows, width, out, base = table.height, table.width, table.out, table.base
    if base is None:
        zero = m.constant(0.0, compute_dtype(out.spec.dtype))
        return for_each(rows, width, lambda flat: out.store(flat, zero))
    copy = for_each(rows, width, lambda flat: out.store(flat, base.load(flat)))
    addresses = [tirx.reinterpret("uint64", one.buffer.data) for one in (base, out)]
    return tirx.IfThenElse(tirx.NE(*addresses), copy, None)


def _each_item(table: TableSum, body: Any, order: Any = None) -> tirx.Stmt:
    """Emit `body(item, id)` for each item that counts; `order(step)` says which one comes when."""
    names = (NUMBERS, "item", f"{ROW}_of_table")
    step, item, id_ = (tirx.Var(name, "int32") for name in names)
    statements = [
        tirx.Bind(item, step if order is None else order(step)),
        tirx.Bind(id_, table.id_of(item)),
        tirx.IfThenElse(table.counts(id_), body(item, id_), None),
    ]
    return For(step, 0, table.items, ForKind.SERIAL, tirx.SeqStmt(statements))


def _linked(table: TableSum, first: FlatBuffer, after: FlatBuffer) -> tirx.Stmt:
    """Emit the lists of the items of each id, from the last item to the first."""

    def link(item: Any, id_: Any) -> tirx.Stmt:
        return tirx.SeqStmt([after.store(item, first.load(id_)), first.store(id_, item)])

    return _each_item(table, link, lambda step: table.items - 1 - step)


def _summed(
    table: TableSum, first: FlatBuffer, after: FlatBuffer, row_of: Callable[[Any, Any], Any]
) -> tirx.Stmt:
    """Emit the sums: a task has some columns of the ids that begin at every `_PARTS`th item.

    `row_of(item, id)` is the row of the result for an id and its first item.
    """
    count, width = table.items, table.width
    block = _BLOCK if width % _BLOCK == 0 else width
    names = ("task", "visit", "start", "item", f"{ROW}_of_table")
    task, step, start, item, id_ = (tirx.Var(name, "int32") for name in names)
    dtype = compute_dtype(table.out.spec.dtype)
    total, now = task_buffer(block, dtype, "total"), task_buffer(1, "int32", "now")
    zero = tirx.const(0, "int32")
    current = tirx.BufferLoad(now, [zero])

    def grad(row: Any, column: Any) -> Any:
        return m.cast(table.rows.load(row * width + start + column), dtype)

    def of_first(column: Any) -> tirx.Stmt:
        one = grad(item, column)
        if table.in_order and table.base is not None:
            one = table.out.load(row_of(item, id_) * width + start + column) + one
        else:
            one = _plus_zero(one)
        return tirx.BufferStore(total, one, [column])

    def of_next(column: Any) -> tirx.Stmt:
        summed = tirx.BufferLoad(total, [column]) + grad(current, column)
        return tirx.BufferStore(total, summed, [column])

    def put(column: Any) -> tirx.Stmt:
        at = row_of(item, id_) * width + start + column
        taken = table.scaled(tirx.BufferLoad(total, [column]))
        is_whole = table.base is None or table.in_order
        return table.out.store(at, taken if is_whole else table.out.load(at) + taken)

    def move(row: Any) -> tirx.Stmt:
        return tirx.BufferStore(now, after.load(row), [zero])

    summed = [
        columns(zero, block, of_first),
        move(item),
        tirx.While(current >= 0, tirx.SeqStmt([columns(zero, block, of_next), move(current)])),
        columns(zero, block, put),
    ]
    # An `all` of both conditions may read `first` at an id outside of the table.
    begins = tirx.IfThenElse(tirx.EQ(first.load(id_), item), sequence(summed), None)
    found = [
        tirx.Bind(id_, table.id_of(item)),
        tirx.IfThenElse(table.counts(id_), begins, None),
    ]
    visited: tirx.Stmt = sequence(found)
    if count % _PARTS:
        visited = tirx.IfThenElse(item < count, visited, None)
    own = [tirx.Bind(item, step * _PARTS + tirx.floormod(task, _PARTS)), visited]
    body = [
        tirx.Bind(start, tirx.floordiv(task, _PARTS) * block),
        tirx.AllocBuffer(total),
        tirx.AllocBuffer(now),
        For(step, 0, -(-count // _PARTS), ForKind.SERIAL, sequence(own)),
    ]
    return For(task, 0, width // block * _PARTS, ForKind.PARALLEL, sequence(body))


def _plus_zero(element: Any) -> Any:
    """Return 0 + an element: -0.0 becomes 0.0. TVM takes a sum with 0 for the other term."""
    zero = m.constant(0.0, m.dtype_of(element))
    return tirx.Select(tirx.EQ(element, zero), zero, element)


def for_each(rows: int, width: int, body: Any) -> tirx.Stmt:
    """Emit `body(flat)` for each element of a matrix: parallel over rows, in vectors along them."""
    row = tirx.Var(ROW, "int32")
    loops = columns(0, width, lambda column: body(row * width + column))
    return For(row, 0, rows, ForKind.PARALLEL, loops)


def columns(start: Any, extent: int, body: Any) -> tirx.Stmt:
    """Emit `body(column)` for `extent` columns from `start`, in vectors, then one by one."""
    bulk = extent // LANES * LANES
    statements: list[tirx.Stmt] = []
    if bulk:
        step, lane = tirx.Var("step", "int32"), tirx.Var("lane", "int32")
        vector = For(lane, 0, LANES, ForKind.VECTORIZED, body(start + step * LANES + lane))
        statements.append(For(step, 0, bulk // LANES, ForKind.SERIAL, vector))
    if bulk < extent:
        tail = tirx.Var("tail", "int32")
        rest = extent - bulk
        statements.append(For(tail, 0, rest, ForKind.SERIAL, body(start + bulk + tail)))
    return statements[0] if len(statements) == 1 else tirx.SeqStmt(statements)
