# SPDX-License-Identifier: Apache-2.0
"""CUDA launches of a group without sums over its rows.

Without any sum every thread computes one vector of elements. The threads of a block, of a warp or
of less share a row that is summed; blocks share few long rows, and then each level is a launch:
the next launch combines the partial results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

from amp_ir.loops.codegen.accumulators import ends_of_block
from amp_ir.loops.codegen.kernel import unflatten_axes
from amp_ir.loops.codegen.kernel_buffers import FlatBuffer
from amp_ir.loops.codegen.statements import sequence
from amp_ir.loops.cuda.group_elements import (
    MANY_BLOCKS,
    GroupElements,
    Take,
    accumulator_in,
    accumulator_of,
    adding,
    both,
    kept_dtype_of,
    named,
    power_of_two,
    result_in,
    wide_accumulator_of,
)
from amp_ir.loops.cuda.launch import THREADS, WARP, ThreadAccumulator, guarded, launch
from amp_ir.loops.ir import Reduction

# Vectors of a row that a thread goes through before more threads share the row.
VECTORS_A_THREAD = 4
MAX_THREADS = 1024


def flat_launch(elements: GroupElements) -> tirx.Stmt:
    """Emit one vector of elements per thread, whatever row it is in."""
    total = elements.rows * elements.chunks
    blocks = -(-total // THREADS)
    (level,) = elements.levels

    def body(block: Any, thread: Any) -> list[tirx.Stmt]:
        at = block * THREADS + thread if blocks > 1 else thread
        row, chunk = tirx.Var("row", "int32"), tirx.Var("chunk", "int32")
        parts = unflatten_axes(row, elements.row_axes)
        row_elements: dict[int, Any] = {}
        is_first = tirx.EQ(chunk, tirx.const(0, "int32"))
        statements = [
            tirx.Bind(row, tirx.floordiv(at, elements.chunks)),
            tirx.Bind(chunk, tirx.floormod(at, elements.chunks)),
            *elements.start_level(level, parts, row_elements, is_first),
            *elements.chunk(level, parts, chunk, row_elements, []),
        ]
        return guarded(at < total if total % THREADS else None, [sequence(statements)])

    return launch(blocks, THREADS, body)


def rows_launch(elements: GroupElements) -> tirx.Stmt:
    """Emit a row per block, warp or less; a block then has several rows."""
    threads = threads_of_row(elements)
    together = max(1, THREADS // threads) if threads <= WARP else 1
    together = min(together, power_of_two(elements.rows))
    blocks = -(-elements.rows // together)

    def body(block: Any, thread: Any) -> list[tirx.Stmt]:
        row = tirx.Var("row", "int32")
        at = block * together + tirx.floordiv(thread, threads) if together > 1 else block
        inside = None
        if elements.rows % together:
            # All threads take part in shuffles; those without a row look at the last one.
            inside = at < elements.rows
            at = tirx.min(at, elements.rows - 1)
        mine = tirx.floormod(thread, threads) if together > 1 else thread
        rest = row_body(elements, row, (mine, threads), inside)
        return [tirx.Bind(row, at), *rest]

    return launch(blocks, threads * together, body)


def threads_of_row(elements: GroupElements) -> int:
    """Return how many threads share a row: a power of two."""
    if elements.chunks <= WARP:
        return power_of_two(elements.chunks)
    wanted = power_of_two(-(-elements.chunks // VECTORS_A_THREAD))
    return max(WARP, min(MAX_THREADS, wanted))


def row_body(
    elements: GroupElements,
    row: Any,
    share: tuple[Any, int],
    inside: Any,
    sums: Callable[..., Any] | None = None,
) -> list[tirx.Stmt]:
    """Emit one row by the threads of `share` (this thread, how many), level by level.

    `inside`: the condition under which the row exists; None: always. `sums`: how elements of
    reductions over the rows are accumulated.
    """
    thread, threads = share
    parts = unflatten_axes(row, elements.row_axes)
    row_elements: dict[int, Any] = {}
    statements: list[tirx.Stmt] = []
    is_first = tirx.EQ(thread, tirx.const(0, "int32"))
    for level in elements.levels:
        statements += elements.start_level(level, parts, row_elements, both(is_first, inside))
        is_long = elements.has_long_shares(threads, is_summed=sums is not None)
        accumulators = [accumulator_of(value, is_long=is_long) for value in level.reductions]
        for accumulator in accumulators:
            statements += accumulator.start()
        if level.stores or level.reductions or level.columns:
            takes = _taking(level.reductions, accumulators)
            flush = ends_of_block(accumulators)
            passes = elements.shared_row(level, parts, row_elements, takes, share, sums, flush)
            statements += guarded(inside, passes)
        for value, accumulator in zip(level.reductions, accumulators, strict=True):
            statements += accumulator.totals.over_threads(threads, thread)
            row_elements[id(value)] = named(statements, result_in(value, accumulator))
    return statements


def split_launches(elements: GroupElements) -> list[tirx.Stmt]:
    """Emit rows that blocks share: one launch per level, with partial results in workspace."""
    threads = THREADS
    most = -(-elements.chunks // threads)
    parts = max(1, min(-(-MANY_BLOCKS // elements.rows), most, THREADS))
    is_long = elements.has_long_shares(threads * parts)
    partial = {
        id(value): elements.make_workspace(
            elements.rows * parts, kept_dtype_of(value, is_long=is_long)
        )
        for level in elements.levels
        for value in level.reductions
    }
    return [
        _split_launch(elements, number, parts, partial)
        for number, level in enumerate(elements.levels)
        if level.stores or level.reductions or elements.stores_rows(level)
    ]


def _split_launch(
    elements: GroupElements, number: int, parts: int, partial: dict[int, FlatBuffer]
) -> tirx.Stmt:
    level, threads = elements.levels[number], THREADS
    is_shared = bool(level.stores or level.reductions)
    shares = parts if is_shared else 1

    def body(block: Any, thread: Any) -> list[tirx.Stmt]:
        row, part = tirx.Var("row", "int32"), tirx.Var("part", "int32")
        statements: list[tirx.Stmt] = [
            tirx.Bind(row, tirx.floordiv(block, shares)),
            tirx.Bind(part, tirx.floormod(block, shares)),
        ]
        row_elements: dict[int, Any] = {}
        for earlier in elements.levels[:number]:
            for value in earlier.reductions:
                buffer = partial[id(value)].buffer
                statements += _finish(value, buffer, row, parts, thread, row_elements)
        rows = unflatten_axes(row, elements.row_axes)
        is_first = tirx.all(tirx.EQ(part, 0), tirx.EQ(thread, 0))
        statements += elements.start_level(level, rows, row_elements, is_first)
        is_long = elements.has_long_shares(threads * parts)
        accumulators = [accumulator_of(value, is_long=is_long) for value in level.reductions]
        for accumulator in accumulators:
            statements += accumulator.start()
        if is_shared:
            share = (part * threads + thread, threads * parts)
            takes, flush = _taking(level.reductions, accumulators), ends_of_block(accumulators)
            statements += elements.shared_row(level, rows, row_elements, takes, share, flush=flush)
        for value, accumulator in zip(level.reductions, accumulators, strict=True):
            totals = accumulator.totals
            statements += totals.over_threads(threads, thread)
            put = tirx.BufferStore(
                partial[id(value)].buffer,
                tirx.BufferLoad(totals.running, [0]), [row * parts + part],
            )  # fmt: skip
            statements += guarded(tirx.EQ(thread, 0), [put])
        return statements

    return launch(elements.rows * shares, threads, body)


def _finish(
    value: Reduction,
    buffer: Any,
    row: Any,
    parts: int,
    thread: Any,
    row_elements: dict[int, Any],
) -> list[tirx.Stmt]:
    """Combine the partial results of a row; every thread gets the result."""
    accumulator = wide_accumulator_of(value)
    statements = accumulator.start()
    load = accumulator.put(accumulator_in(value, buffer).result(row * parts + thread))
    statements += guarded(thread < parts, [load])
    statements += accumulator.over_threads(THREADS, thread)
    row_elements[id(value)] = named(statements, result_in(value, accumulator))
    return statements


def _taking(
    reductions: list[Reduction], accumulators: list[ThreadAccumulator]
) -> list[tuple[Reduction, Take]]:
    pairs = zip(reductions, accumulators, strict=True)
    return [(value, adding(accumulator)) for value, accumulator in pairs]
