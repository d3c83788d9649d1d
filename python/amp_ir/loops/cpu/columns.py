# SPDX-License-Identifier: Apache-2.0
"""CPU kernels whose reductions run over outer dimensions: one result per column of memory."""

from __future__ import annotations

import math
from typing import Any

import attrs
from tvm import tirx
from tvm.tirx import For, ForKind

from amp_ir.ir.row_loops import ROW
from amp_ir.ir.vector_instructions import LANES
from amp_ir.loops.codegen.accumulate_blocks import COLUMN_BLOCK, nested
from amp_ir.loops.codegen.accumulators import Accumulator, ends_of_block
from amp_ir.loops.codegen.kernel import unflatten_axes
from amp_ir.loops.codegen.statements import sequence
from amp_ir.loops.cpu.group_loops import (
    COLUMN_BLOCKS,
    GRAIN,
    MOST_COLUMNS,
    GroupLoops,
    block_loops,
    is_zero,
)
from amp_ir.loops.group import Domain, Group
from amp_ir.loops.ir import Reduction

# Rows up to which a thread adds up columns of all rows. With more, the sums of 16 parts of the rows
# are few beside the elements, and whole rows are read from memory faster than pieces of them.
FEW_ROWS = 128
# Columns from which on there are enough of them for all threads.
MANY_COLUMNS = 2048


def with_few_rows(group: Group) -> Group | None:
    """Return the group with its sums over few long rows as results of outer dimensions.

    The sums of each of 16 parts of the rows would be as many as the elements, in new memory. None
    where the group computes for rows too, or its members differ in shape.
    """
    domain = group.domain
    if group.row or not group.column:
        return None
    if domain.rows > FEW_ROWS or domain.columns < MANY_COLUMNS:
        return None
    shapes = {one.source_shape for one in group.column if isinstance(one, Reduction)}
    if shapes | {one.shape for one in group.full} != {domain.shape}:
        return None
    summed = tuple(d for d in range(len(domain.shape)) if d not in (domain.axes or ()))
    return attrs.evolve(group, domain=Domain(domain.shape, summed), row=group.column, column=[])


def columns_kernel(loops: GroupLoops) -> tirx.Stmt:
    """Emit blocks of columns, each over all rows."""
    inner = loops.row_axes[-1]
    block = _block(inner.extent)
    whole = inner.extent // block * block
    statements: list[tirx.Stmt] = []
    outer_rows = math.prod(axis.extent for axis in loops.row_axes[:-1])
    if whole:
        task = tirx.Var("task", "int32")
        blocks = whole // block
        outer = unflatten_axes(_div(task, blocks), loops.row_axes[:-1])
        start = tirx.floormod(task, blocks) * block if blocks > 1 else 0
        body = sequence(_column_block(loops, outer, start, block))
        is_parallel = loops.domain.size > GRAIN and outer_rows * blocks > 1
        kind = ForKind.PARALLEL if is_parallel else ForKind.SERIAL
        statements.append(For(task, 0, outer_rows * blocks, kind, body))
    if whole < inner.extent:
        task = tirx.Var("rest", "int32")
        outer = unflatten_axes(task, loops.row_axes[:-1])
        body = sequence(_column_block(loops, outer, whole, inner.extent - whole))
        statements.append(For(task, 0, outer_rows, ForKind.SERIAL, body))
    return sequence(statements)


def _block(columns: int) -> int:
    """Return how many columns a block has: all alike where vectors fill them, at most 192."""
    whole = (b for b in range(MOST_COLUMNS, 0, -LANES) if columns % b == 0)
    some = (b for b in COLUMN_BLOCKS if columns >= b)
    return next(whole, None) or next(some, 1)


def _column_block(loops: GroupLoops, outer: list[Any], start: Any, block: int) -> list[tirx.Stmt]:
    level = loops.levels[0]
    extents = [axis.extent for axis in loops.column_axes]
    accumulators = [
        Accumulator.declare(value, block, is_long=math.prod(extents) > COLUMN_BLOCK)
        for value in level.reductions
    ]
    statements: list[tirx.Stmt] = []
    for accumulator in accumulators:
        statements += accumulator.allocate()
    is_long = any(accumulator.wide is not None for accumulator in accumulators)
    columns = nested(
        [f"{ROW}{d}" for d in range(len(extents))], extents, COLUMN_BLOCK if is_long else None
    )

    def visit(offset: Any, lane: Any) -> tuple[tirx.Stmt, bool]:
        place = [loop.at for loop in columns]
        writer = loops.writer([*outer, offset], place, {}, lane)
        written = loops.visit(writer, level, accumulators, _minus(offset, start))
        return written, writer.is_scalar

    inner = block_loops(start, block, visit)
    for loop in reversed(columns):
        inner = [loop.around(inner, ends_of_block(accumulators))]
    statements += inner

    def finish(offset: Any, lane: Any) -> tuple[tirx.Stmt, bool]:
        writer = loops.writer([*outer, offset], None, {})
        for accumulator in accumulators:
            element = accumulator.at(_minus(offset, start))
            buffer = loops.buffers.get(id(accumulator.value))
            if buffer is not None:
                flat = writer.position.flat_row()
                writer.body.append(buffer.store(flat, element))
        return sequence(writer.body), False

    return loops.with_allocations(statements + block_loops(start, block, finish))


def _div(a: Any, b: int) -> Any:
    return a if b == 1 else tirx.floordiv(a, b)


def _minus(a: Any, b: Any) -> Any:
    return a if is_zero(b) else a - b
