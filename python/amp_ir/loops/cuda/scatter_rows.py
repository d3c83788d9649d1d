# SPDX-License-Identifier: Apache-2.0
"""The gradient of a table on a GPU: rows added in order, so that results are deterministic.

A block for each item searches all ids for its own. Only the block of an id's first occurrence
continues, and adds the rows of that id in order: no two blocks write the same row, and no atomic
operation decides an order.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from amp_ir.loops import math as m
from amp_ir.loops.codegen.kernel_buffers import FlatBuffer
from amp_ir.loops.cuda.launch import THREADS, ThreadAccumulator, guarded, launch, loop
from amp_ir.loops.ir import TensorSpec, compute_dtype

# Threads of a block: the ids are looked through in as many steps as they are more than this.
_SEARCHERS = 128


def scatter_rows(
    grad: FlatBuffer,
    ids: FlatBuffer,
    out: FlatBuffer,
    padding_idx: int | None,
    base: FlatBuffer | None,
) -> list[tirx.Stmt]:
    """Emit the table of `out`: `base`, or zeros, with the rows of `grad` added at `ids`.

    The table is accumulated in float32 or wider; a low dtype is rounded once at the end.
    """
    total, statements = out, []
    dtype = compute_dtype(out.spec.dtype)
    if out.spec.dtype != dtype:
        total = FlatBuffer.declare(TensorSpec(out.spec.shape, dtype), "total")
        statements.append(tirx.AllocBuffer(total.buffer))

    def start(at: Any) -> tirx.Stmt:
        return total.store(at, m.constant(0.0, dtype) if base is None else base.load(at))

    statements += [_for_each(out.spec.size, start), _add_rows(grad, ids, total, padding_idx)]
    if total is not out:
        statements.append(_for_each(out.spec.size, lambda at: out.store(at, total.load(at))))
    return statements


def _for_each(size: int, body: Any) -> tirx.Stmt:
    blocks = -(-size // THREADS)

    def task(block: Any, thread: Any) -> list[tirx.Stmt]:
        at = block * THREADS + thread
        return guarded(at < size if size % THREADS else None, [body(at)])

    return launch(blocks, THREADS, task)


def _add_rows(
    grad: FlatBuffer, ids: FlatBuffer, total: FlatBuffer, padding_idx: int | None
) -> tirx.Stmt:
    count = ids.spec.size
    rows, width = total.spec.shape

    def task(item: Any, thread: Any) -> list[tirx.Stmt]:
        own = tirx.Var("own", "int32")
        # How many earlier items have this id, and where the last one with it is.
        earlier = ThreadAccumulator.declare("sum", "int32")
        last = ThreadAccumulator.declare("max", "int32")

        def look(step: Any) -> list[tirx.Stmt]:
            other = tirx.Var("other", "int32")
            is_same = tirx.EQ(tirx.Cast("int32", ids.load(other)), own)
            inside = other < count if count % _SEARCHERS else None
            zero, one = m.constant(0, "int32"), m.constant(1, "int32")
            counted = tirx.Select(tirx.all(is_same, other < item), one, zero)
            found = [earlier.add(counted), last.add(tirx.Select(is_same, other, zero))]
            return [tirx.Bind(other, step * _SEARCHERS + thread), *guarded(inside, found)]

        # An id outside of the table must not become a write outside of the buffer.
        counts = tirx.all(tirx.EQ(earlier.result(), 0), m.inside(own, rows))
        if padding_idx is not None:
            counts = tirx.all(counts, tirx.NE(own, tirx.const(padding_idx, "int32")))
        adding = _add_columns(grad, ids, total, width, (item, own, thread, last.result()))
        return [
            tirx.Bind(own, tirx.Cast("int32", ids.load(item))),
            *earlier.start(),
            *last.start(),
            *loop(-(-count // _SEARCHERS), "step", look),
            *earlier.over_threads(_SEARCHERS, thread),
            *last.over_threads(_SEARCHERS, thread),
            *guarded(counts, adding),
        ]

    return launch(count, _SEARCHERS, task)


def _add_columns(
    grad: FlatBuffer, ids: FlatBuffer, total: FlatBuffer, width: int, place: tuple[Any, ...]
) -> list[tirx.Stmt]:
    """Add all rows of an id, from its first item to its last, to its row of the table."""
    item, own, thread, last = place

    def column(step: Any) -> list[tirx.Stmt]:
        at = tirx.Var("column", "int32")
        # In order, however many there are: so float64, as in no other order roundings stay few.
        running = ThreadAccumulator.declare("sum", "float64")
        other = tirx.Var("other", "int32")
        is_same = tirx.EQ(tirx.Cast("int32", ids.load(other)), own)
        take = running.add(grad.load(other * width + at))
        rows = tirx.For(
            other, item, last - item + 1, tirx.ForKind.SERIAL,
            tirx.IfThenElse(is_same, take, None),
        )  # fmt: skip
        to = own * width + at
        added = [
            tirx.AllocBuffer(running.running),
            running.put(total.load(to)),
            rows,
            total.store(to, m.cast(running.result(), total.spec.dtype)),
        ]
        inside = at < width if width % _SEARCHERS else None
        return [tirx.Bind(at, step * _SEARCHERS + thread), *guarded(inside, added)]

    return loop(-(-width // _SEARCHERS), "step", column)
