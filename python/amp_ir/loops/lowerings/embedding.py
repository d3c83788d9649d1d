# SPDX-License-Identifier: Apache-2.0
"""Lowering of table look-up and of the table's gradient."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx import For, ForKind

from amp_ir.ir.row_loops import ROW
from amp_ir.ir.vector_instructions import LANES
from amp_ir.loops import math as m
from amp_ir.loops.builders import opaque, pointwise
from amp_ir.loops.codegen.kernel_buffers import FlatBuffer
from amp_ir.loops.ir import Opaque, TensorSpec, Value, compute_dtype
from amp_ir.loops.lowering_registry import Lowering, lowers
from amp_ir.loops.lowerings.gather import row_index

# Columns that one task adds up: few enough for parallel work, enough for whole cache lines.
_BLOCK = 4 * LANES


@lowers("amp_ir.embedding")
def embedding(op: Lowering, weight: Value, ids: Value) -> Value:
    """Gather rows of `weight` at `ids`."""
    result = op.results[0]

    def body(*i: Any) -> Any:
        return weight[(row_index(ids[i[:-1]], weight.shape[0]), i[-1])]

    return pointwise(result.shape, result.dtype, body)


@lowers("amp_ir.embedding_backward")
def embedding_backward(
    op: Lowering, grad: Value, ids: Value, base: Value | None = None, **options: Any
) -> Opaque:
    """Add the rows of `grad` at `ids`, in order, each task for some columns: exact and parallel.

    With `base`, which accumulate_rows.py adds, the rows are added to it, in its memory if that has
    no other reader.
    """
    result = op.results[0]
    padding_idx = options.get("padding_idx")

    def emit(inputs: list[FlatBuffer], outputs: list[FlatBuffer]) -> tirx.Stmt:
        start = inputs[2] if base is not None else None
        return _scatter_rows(inputs[0], inputs[1], outputs[0], padding_idx, start)

    def emit_cuda(inputs: list[FlatBuffer], outputs: list[FlatBuffer]) -> list[tirx.Stmt]:
        from amp_ir.loops.cuda.scatter_rows import scatter_rows

        start = inputs[2] if base is not None else None
        return scatter_rows(inputs[0], inputs[1], outputs[0], padding_idx, start)

    inputs = [grad, ids] if base is None else [grad, ids, base]
    pairs = () if base is None else ((0, 2),)
    return opaque("embedding_backward", inputs, [result], emit, pairs, emit_cuda)[0]


def _scatter_rows(
    grad: FlatBuffer,
    ids: FlatBuffer,
    out: FlatBuffer,
    padding_idx: int | None,
    base: FlatBuffer | None = None,
) -> tirx.Stmt:
    rows, width = out.spec.shape
    statements: list[tirx.Stmt] = []
    total, dtype = out, compute_dtype(out.spec.dtype)
    if out.spec.dtype != dtype:
        total = FlatBuffer.declare(TensorSpec(out.spec.shape, dtype), "total")
        statements.append(tirx.AllocBuffer(total.buffer))

    def start(flat: Any) -> tirx.Stmt:
        return total.store(flat, m.constant(0.0, dtype) if base is None else base.load(flat))

    statements.append(for_each(rows, width, start))
    statements.append(_add_rows(grad, ids, total, width, padding_idx))
    if total is not out:
        statements.append(for_each(rows, width, lambda flat: out.store(flat, total.load(flat))))
    return tirx.SeqStmt(statements)


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


def _add_rows(
    grad: FlatBuffer, ids: FlatBuffer, total: FlatBuffer, width: int, padding_idx: int | None
) -> tirx.Stmt:
    block = _BLOCK if width % _BLOCK == 0 else width
    task, row = tirx.Var("task", "int32"), tirx.Var(ROW, "int32")
    id_ = tirx.Var("id", "int32")
    count = ids.spec.size

    def add(column: Any) -> tirx.Stmt:
        to = id_ * width + column
        return total.store(to, total.load(to) + grad.load(row * width + column))

    # An id outside of the table must not become a write outside of the buffer.
    counts = m.inside(id_, total.spec.shape[0])
    if padding_idx is not None:
        counts = tirx.all(counts, tirx.NE(id_, tirx.const(padding_idx, "int32")))
    adding = tirx.IfThenElse(counts, columns(task * block, block, add), None)
    bound = tirx.Bind(id_, tirx.Cast("int32", ids.load(row)))
    body = For(row, 0, count, ForKind.SERIAL, tirx.SeqStmt([bound, adding]))
    return For(task, 0, width // block, ForKind.PARALLEL, body)
