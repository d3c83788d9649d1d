# SPDX-License-Identifier: Apache-2.0
"""CPU kernels that also reduce over their rows: each part of the rows has its own sums.

The parts are combined at the end, in order, so results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.tirx import For, ForKind

from amp_ir.ir.row_loops import ROW
from amp_ir.loops.codegen.accumulate_blocks import COLUMN_BLOCK, Loop
from amp_ir.loops.codegen.kernel import unflatten_axes
from amp_ir.loops.codegen.statements import sequence
from amp_ir.loops.cpu.column_sums import ColumnSums
from amp_ir.loops.cpu.group_loops import GRAIN, GroupLoops, block_loops
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
    ends = _each_column(extent, lambda column: [one.flush(column) for one in long]) if long else []
    clears = _each_column(extent, lambda column: [one.clear(column) for one in sums])
    kind = ForKind.PARALLEL if is_parallel else ForKind.SERIAL
    statements = [buffer.allocation() for one in sums for buffer in one.buffers]
    parts = For(place[1], 0, place[0], kind, sequence([*clears, row.around(body, ends)]))
    statements.append(parts)
    buffers = [loops.buffers[id(one.value)] for one in sums]

    def totals(column: Any) -> list[tirx.Stmt]:
        folded = [statement for one in sums for statement in one.fold(column)]
        stores = zip(sums, buffers, strict=True)
        return [*folded, *(buffer.store(column, one.total(column)) for one, buffer in stores)]

    return sequence([*statements, *_each_column(extent, totals)])


def _each_column(extent: int, statements: Callable[[Any], Sequence[tirx.Stmt]]) -> list[tirx.Stmt]:
    """Emit one loop over the columns with the statements of all sums.

    A loop for each sum makes LLVM's code of bert1 a tenth longer.
    """
    return block_loops(0, extent, lambda column, _lane: (sequence(statements(column)), False))
