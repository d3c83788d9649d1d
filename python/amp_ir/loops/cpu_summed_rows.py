# SPDX-License-Identifier: Apache-2.0
"""CPU kernels whose rows are also added up: each part of the rows has its own sums.

The parts are combined at the end, in order, so results do not depend on the number of threads.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx import For, ForKind

from amp_ir.loops.accumulate_blocks import BLOCK, Loop
from amp_ir.loops.column_sums import ColumnSums, TileSums
from amp_ir.loops.cpu_loops import COLUMN_BLOCKS, GRAIN, Body, GroupLoops, block_loops
from amp_ir.loops.ir import LANES, Reduction
from amp_ir.loops.kernel import unflatten_axes
from amp_ir.loops.kernel_buffers import FlatBuffer
from amp_ir.loops.statements import sequence

# Parts into which rows are cut when they are added up (fixed: the same sum always).
ROW_PARTS = 16
# Rows of a tile: its sums go to memory once for so many.
TILE_ROWS = 4 * BLOCK


def summed_rows_kernel(loops: GroupLoops, rows: int) -> tirx.Stmt:
    """All rows, and the sums of `loops.group.column` over them."""
    is_parallel = loops.domain.size > GRAIN
    share = -(-rows // ROW_PARTS) if is_parallel else rows
    place = (-(-rows // share), tirx.Var("part", "int32"))
    count = None if rows % share == 0 else tirx.min(share, rows - place[1] * share)
    row, extent = Loop("row", share, count), loops.domain.columns
    body = _whole_rows(loops, row, place) if _needs_rows(loops) else _tiles(loops, row, place)
    sums = [one for one in loops.column_sums if isinstance(one, ColumnSums)]
    clears = [loop for one in sums for loop in block_loops(0, extent, _clear(one))]
    kind = ForKind.PARALLEL if is_parallel else ForKind.SERIAL
    statements = [buffer.allocation() for one in sums for buffer in one.buffers]
    statements.append(For(place[1], 0, place[0], kind, sequence([*clears, body])))
    for one in sums:
        statements += block_loops(0, extent, _store(one, loops.buffers[id(one.value)]))
    return sequence(statements)


def _needs_rows(loops: GroupLoops) -> bool:
    """Whether something is reduced or computed for a whole row."""
    level, *later = loops.levels
    return bool(later or level.row_values or level.reductions)


def _summed(loops: GroupLoops) -> list[Reduction]:
    return [value for value in loops.group.column if isinstance(value, Reduction)]


def _whole_rows(loops: GroupLoops, row: Loop, place: tuple[int, Any]) -> tirx.Stmt:
    """One row after the other."""
    extent, is_long = loops.domain.columns, row.extent > BLOCK
    sums = [ColumnSums.declare(one, place, extent, is_long=is_long) for one in _summed(loops)]
    loops.column_sums = list(sums)
    long = [one for one in sums if one.has_blocks]
    cut = row.cut(BLOCK) if long else row
    inner = loops.row_body(unflatten_axes(place[1] * row.extent + cut.at, loops.row_axes))
    return cut.around(inner, [loop for one in long for loop in block_loops(0, extent, _flush(one))])


def _tiles(loops: GroupLoops, row: Loop, place: tuple[int, Any]) -> tirx.Stmt:
    """Some columns of some rows after the other, so that running values stay in registers."""
    extent, is_long = loops.domain.columns, row.extent > BLOCK
    sums = [ColumnSums.declare(one, place, extent, is_long=is_long) for one in _summed(loops)]
    wholes = [one.without_sums() for one in sums]
    most = min(extent, max(LANES, COLUMN_BLOCKS[0] // len(wholes)))
    width = next((block for block in COLUMN_BLOCKS if most >= block), extent)
    block, count = row.cut(TILE_ROWS), extent // width
    number = tirx.Var("tile", "int32")
    start = number * width if count > 1 else 0
    body = [
        For(number, 0, count, ForKind.SERIAL, sequence(_tile(loops, block, wholes, (start, width))))
    ]
    if extent % width:
        body += _tile(loops, block, wholes, (count * width, extent % width))
    loops.column_sums = list(wholes)
    return block.over_blocks(body)


def _tile(
    loops: GroupLoops, block: Loop, wholes: list[ColumnSums], bounds: tuple[Any, int]
) -> list[tirx.Stmt]:
    """The columns `bounds` (start, width) of the rows of one block."""
    (level,), (start, width) = loops.levels, bounds
    is_long = block.extent > BLOCK
    sums = [TileSums.declare(one, start, width, is_long=is_long) for one in wholes]
    loops.column_sums = list(sums)
    row = block.part().cut(BLOCK) if is_long else block.part()
    at = wholes[0].part * block.extent + block.outer * block.size + row.at
    place = unflatten_axes(at, loops.row_axes)

    def visit(column: Any, lane: Any) -> tuple[tirx.Stmt, bool]:
        writer = loops.writer(place, [column], {}, lane)
        return loops.visit(writer, level, [], lane), writer.is_scalar

    statements = [statement for one in sums for statement in one.begin()]
    ends = [statement for one in sums for statement in one.end_block()]
    statements.append(row.around(block_loops(start, width, visit), ends))
    for one in sums:
        statements += block_loops(start, width, _end(one))
    return loops.with_scratch(statements)


def _clear(sums: ColumnSums) -> Body:
    return lambda column, _lane: (sums.clear(column), False)


def _flush(sums: ColumnSums) -> Body:
    return lambda column, _lane: (sums.flush(column), False)


def _end(sums: TileSums) -> Body:
    return lambda column, _lane: (sums.end(column), False)


def _store(sums: ColumnSums, buffer: FlatBuffer) -> Body:
    def body(column: Any, _lane: Any) -> tuple[tirx.Stmt, bool]:
        return sequence([*sums.fold(column), buffer.store(column, sums.total(column))]), False

    return body
