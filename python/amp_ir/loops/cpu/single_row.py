# SPDX-License-Identifier: Apache-2.0
"""CPU kernels of one long row, whose columns are divided among the threads."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx import For, ForKind

from amp_ir.ir.vector_instructions import LANES
from amp_ir.loops.codegen.accumulators import Accumulator
from amp_ir.loops.codegen.levels import Level
from amp_ir.loops.codegen.statements import sequence
from amp_ir.loops.cpu.group_loops import GroupLoops

# A reduction of everything to one value is cut into this many parts (fixed: the same sum always).
PARTS = 64


def single_row_kernel(loops: GroupLoops) -> tirx.Stmt:
    """Emit the row with its columns divided among the threads, level by level."""
    row: list[Any] = [0 for _ in loops.row_axes]
    row_elements: dict[int, Any] = {}
    statements: list[tirx.Stmt] = []
    for level in loops.levels:
        statements += loops.with_allocations(loops.start_level(level, row, row_elements))
        if level.stores or level.reductions:
            statements += _parallel_level(loops, level, row, row_elements)
    return sequence(statements)


def _parallel_level(
    loops: GroupLoops, level: Level, row: list[Any], row_elements: dict[int, Any]
) -> list[tirx.Stmt]:
    extent = loops.column_axes[-1].extent
    size = -(-extent // (PARTS * LANES)) * LANES
    parts = extent // size
    partial = loops.accumulators(level, size)
    shared = [Accumulator.declare_shared(value, parts) for value in level.reductions]
    part = tirx.Var("part", "int32")
    body: list[tirx.Stmt] = []
    for accumulator in partial:
        body += accumulator.allocate()
    body += loops.column_loops(level, row, row_elements, partial, (part * size, size))
    for accumulator, whole in zip(partial, shared, strict=True):
        body += accumulator.gather()
        body.append(whole.put(part, accumulator.sum_so_far()))
    body = loops.with_allocations(body)
    statements: list[tirx.Stmt] = [whole.allocation() for whole in shared]
    statements.append(For(part, 0, parts, ForKind.PARALLEL, sequence(body)))
    bounds = (parts * size, extent - parts * size)
    rest = loops.accumulators(level, bounds[1], is_shared=True)
    for accumulator in rest:
        statements += accumulator.allocate()
    if bounds[1]:
        left = loops.column_loops(level, row, row_elements, rest, bounds)
        statements += loops.with_allocations(left)
    for accumulator, whole in zip(rest, shared, strict=True):
        statements += accumulator.finish(whole)
        row_elements[id(accumulator.value)] = accumulator.result()
    return statements
