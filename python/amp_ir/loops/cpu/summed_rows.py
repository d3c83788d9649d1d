# SPDX-License-Identifier: Apache-2.0
"""CPU kernels that also reduce over their rows: each part of the rows has its own sums.

The parts are combined at the end, in order, so results do not depend on the number of threads.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx import For, ForKind

from amp_ir.ir.row_loops import ROW
from amp_ir.loops.codegen.accumulate_blocks import COLUMN_BLOCK, Loop
from amp_ir.loops.codegen.kernel import unflatten_axes
from amp_ir.loops.codegen.kernel_buffers import FlatBuffer
from amp_ir.loops.codegen.statements import sequence
from amp_ir.loops.cpu.column_sums import ColumnSums
from amp_ir.loops.cpu.group_loops import GRAIN, Body, GroupLoops, block_loops
from amp_ir.loops.ir import Reduction

# Parts into which rows are cut when they are added up (fixed: the same sum always).
ROW_PARTS = 16


def summed_rows_kernel(loops: GroupLoops, rows: int) -> tirx.Stmt:
    """Emit all rows, and the sums of `loops.group.column` over them."""
    is_parallel = loops.domain.size > GRAIN
    share = -(-rows // ROW_PARTS) if is_parallel else rows
    place = (-(-rows // share), tirx.Var("part", "int32"))
    count = None if rows % share == 0 else tirx.min(share, rows - place[1] * share)
    row, extent = Loop(ROW, share, count), loops.domain.columns
    sums = [
        ColumnSums.declare(value, place, extent, share)
        for value in loops.group.column
        if isinstance(value, Reduction)
    ]
    loops.column_sums = sums
    long = [one for one in sums if one.has_blocks]
    row = row.cut(COLUMN_BLOCK) if long else row
    body = loops.row_body(unflatten_axes(place[1] * share + row.at, loops.row_axes))
    ends = [loop for one in long for loop in block_loops(0, extent, _flush(one))]
    clears = [loop for one in sums for loop in block_loops(0, extent, _clear(one))]
    kind = ForKind.PARALLEL if is_parallel else ForKind.SERIAL
    statements = [buffer.allocation() for one in sums for buffer in one.buffers]
    parts = For(place[1], 0, place[0], kind, sequence([*clears, row.around(body, ends)]))
    statements.append(parts)
    for one in sums:
        statements += block_loops(0, extent, _store(one, loops.buffers[id(one.value)]))
    return sequence(statements)


def _clear(sums: ColumnSums) -> Body:
    return lambda column, _lane: (sums.clear(column), False)


def _flush(sums: ColumnSums) -> Body:
    return lambda column, _lane: (sums.flush(column), False)


def _store(sums: ColumnSums, buffer: FlatBuffer) -> Body:
    def body(column: Any, _lane: Any) -> tuple[tirx.Stmt, bool]:
        return sequence([*sums.fold(column), buffer.store(column, sums.total(column))]), False

    return body
