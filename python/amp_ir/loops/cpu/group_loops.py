# SPDX-License-Identifier: Apache-2.0
"""The loops of a group's CPU kernel: over rows, and level by level over the columns of a row.

In each level one pass over the columns computes what it can, stores finished elements and
accumulates reductions; then the reductions are finished and the next level may read them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from tvm import tirx
from tvm.tirx import For, ForKind

from amp_ir.ir.vector_instructions import LANES
from amp_ir.loops.codegen.accumulate_blocks import BLOCK, Loop, nested
from amp_ir.loops.codegen.accumulators import Accumulator, ends_of_block
from amp_ir.loops.codegen.coordinates import Axis, Position, merged_axes
from amp_ir.loops.codegen.element_writer import ElementWriter
from amp_ir.loops.codegen.held_rows import MOST_HELD, HeldRow
from amp_ir.loops.codegen.kernel_buffers import FlatBuffer
from amp_ir.loops.codegen.levels import Level, assign_levels, held_values
from amp_ir.loops.codegen.statements import sequence
from amp_ir.loops.cpu.column_sums import ColumnSums
from amp_ir.loops.group import Domain, Group

# Elements a thread works on at least, so that a parallel launch (3 us) pays.
GRAIN = 8192
# Columns that are done side by side where the loop over the rows is inside.
COLUMN_BLOCKS = (128, 64, 32, 16)
MOST_COLUMNS = 192

# `body(column, lane)` gives the statement, and whether it can only run lane by lane.
Body = Callable[[Any, Any], "tuple[tirx.Stmt, bool]"]


@attrs.define
class GroupLoops:
    """A group with its loops; `column_sums` are its reductions over the rows.

    `held`: the rows that passes over the columns share, by the id of their value.
    """

    group: Group
    buffers: dict[int, FlatBuffer]
    domain: Domain
    strict: bool
    row_axes: list[Axis] = attrs.field(init=False)
    column_axes: list[Axis] = attrs.field(init=False)
    levels: list[Level] = attrs.field(init=False)
    allocations: list[tirx.Stmt] = attrs.field(factory=list)
    column_sums: list[ColumnSums] = attrs.field(factory=list)
    held: dict[int, HeldRow] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.row_axes, self.column_axes = merged_axes(self.domain)
        if not self.column_axes:
            self.column_axes = [Axis((), 1, 1)]
        self.levels = assign_levels(self.group)

    def row_body(self, row: list[Any]) -> list[tirx.Stmt]:
        """Emit one row, level by level."""
        row_elements: dict[int, Any] = {}
        self.held = self.held_rows()
        statements: list[tirx.Stmt] = [one.allocation() for one in self.held.values()]
        for level in self.levels:
            statements += self.start_level(level, row, row_elements)
            accumulators = self.accumulators(level)
            for accumulator in accumulators:
                statements += accumulator.allocate()
            if level.stores or level.reductions or level.columns:
                statements += self.column_loops(level, row, row_elements, accumulators, None)
            for accumulator in accumulators:
                statements += accumulator.finish()
                row_elements[id(accumulator.value)] = accumulator.result()
            for held in self.held.values():
                held.end_pass()
        return self.with_allocations(statements)

    def held_rows(self) -> dict[int, HeldRow]:
        """Declare the rows to hold of values that several passes need."""
        columns = self.column_axes[-1].extent
        if len(self.column_axes) > 1 or not LANES <= columns <= MOST_HELD:
            return {}
        values = held_values(self.group, self.levels)
        return {id(value): HeldRow.declare(value, columns) for value in values}

    def start_level(
        self, level: Level, row: list[Any], row_elements: dict[int, Any]
    ) -> list[tirx.Stmt]:
        """Emit the values of the row, stored where they are needed."""
        writer = self.writer(row, None, row_elements)
        for value in level.row_values:
            element = writer.row(value)
            if value in self.group.stored:
                store = self.buffers[id(value)].store(writer.position.flat_row(), element)
                writer.body.append(store)
        return writer.body

    def column_loops(
        self,
        level: Level,
        row: list[Any],
        row_elements: dict[int, Any],
        accumulators: list[Accumulator],
        inner_range: tuple[Any, int] | None,
    ) -> list[tirx.Stmt]:
        """Emit loops over a row's columns, or over `inner_range` (start, extent) of its axis."""
        inner_extent = self.column_axes[-1].extent
        start, extent = inner_range if inner_range is not None else (0, inner_extent)
        bulk = extent // LANES * LANES
        *outer, steps = self._column_nest(accumulators, bulk // LANES)
        flush = ends_of_block(accumulators)

        def body(column: Any, lane: Any | None) -> tuple[tirx.Stmt, bool]:
            place = [*(loop.at for loop in outer), column]
            writer = self.writer(row, place, dict(row_elements), lane)
            return self.visit(writer, level, accumulators, lane), writer.is_scalar

        statements = lane_loops(start, steps, body, flush) if bulk else []
        if bulk < extent:
            tail = tirx.Var("tail", "int32")
            at = start + bulk + tail if not is_zero(start) or bulk else tail
            statements.append(For(tail, 0, extent - bulk, ForKind.SERIAL, body(at, None)[0]))
        for loop in reversed(outer):
            statements = [loop.around(statements, flush)]
        is_cut = any(loop.size is not None for loop in (*outer, steps))
        return statements if is_cut or not bulk else [*statements, *flush]

    def _column_nest(self, accumulators: list[Accumulator], steps: int) -> list[Loop]:
        """Emit loops over the outer column axes and vectors along the last one, cut into blocks."""
        extents = [*(axis.extent for axis in self.column_axes[:-1]), steps]
        is_long = any(accumulator.wide is not None for accumulator in accumulators)
        names = [*(f"c{d}" for d in range(len(extents) - 1)), "step"]
        return nested(names, extents, BLOCK if is_long else None)

    def accumulators(
        self, level: Level, extent: int | None = None, *, is_shared: bool = False
    ) -> list[Accumulator]:
        """Declare reductions over the columns, of which a thread takes `extent` of the last axis.

        `is_shared`: they also take the partial results of other threads.
        """
        extent = self.column_axes[-1].extent if extent is None else extent
        outer = math.prod(axis.extent for axis in self.column_axes[:-1])
        taken = outer * max(extent // LANES, extent % LANES)
        is_long = is_shared or taken > BLOCK
        return [Accumulator.declare(value, is_long=is_long) for value in level.reductions]

    def visit(
        self, writer: ElementWriter, level: Level, accumulators: list[Accumulator], lane: Any
    ) -> tirx.Stmt:
        """Emit the work at one element. All reads precede all stores: see `inplace_pairs`."""
        elements = [writer.full(value) for value in level.stores]
        added = [(s, writer.reduced(s.value)) for s in self.column_sums if s.value in level.columns]
        reduced = [writer.reduced(accumulator.value) for accumulator in accumulators]
        flat = writer.position.flat() if elements else None
        for value, element in zip(level.stores, elements, strict=True):
            writer.body.append(self.buffers[id(value)].store(flat, element))
        for sums, element in added:
            assert writer.position.column is not None
            writer.body.append(sums.add(writer.position.column[-1], element))
        for accumulator, element in zip(accumulators, reduced, strict=True):
            writer.body.append(accumulator.add(lane, element))
        return sequence(writer.body)

    def writer(
        self,
        row: list[Any],
        column: list[Any] | None,
        row_elements: dict[int, Any],
        lane: Any = None,
    ) -> ElementWriter:
        """Return a writer at a position; without a column it writes values of the row."""
        axes = self.column_axes
        if column is not None and not axes[-1].dimensions:
            axes, column = [], []
        position = self.position(axes, row, column)
        position.lane = lane
        writer = ElementWriter(self.group, self.buffers, position, row_elements, self.strict, lane)
        writer.allocations, writer.held = self.allocations, self.held
        return writer

    def position(self, axes: list[Axis], row: list[Any], column: list[Any] | None) -> Position:
        """Return the position of a row and a column over `axes`."""
        return Position(self.domain, self.row_axes, axes, row, column)

    def with_allocations(self, statements: list[tirx.Stmt]) -> list[tirx.Stmt]:
        """Prepend the allocations that writing `statements` made."""
        allocations = list(self.allocations)
        self.allocations.clear()
        return allocations + statements


def lane_loops(
    start: Any, steps: Loop, body: Body, flush: Sequence[tirx.Stmt] = ()
) -> list[tirx.Stmt]:
    """Emit a loop over LANES columns per iteration, in vectors.

    `body(column, lane)` returns the statement, and whether it must run lane by lane.
    """
    lane = tirx.Var("lane", "int32")
    at = steps.at * LANES + lane if steps.extent > 1 else lane
    column = at if is_zero(start) else start + at
    statement, is_scalar = body(column, lane)
    kind = ForKind.SERIAL if is_scalar else ForKind.VECTORIZED
    vector = For(lane, 0, LANES, kind, statement)
    if steps.extent == 1:
        return [vector]
    return [steps.around([vector], flush)]


def block_loops(start: Any, block: int, body: Body) -> list[tirx.Stmt]:
    """Emit loops over `block` columns from `start`, in vectors as far as they fill them."""
    bulk = block // LANES * LANES
    statements = lane_loops(start, Loop("step", bulk // LANES), body) if bulk else []
    if bulk < block:
        lane = tirx.Var("lane", "int32")
        at = bulk + lane if bulk else lane
        column = at if is_zero(start) else start + at
        rest = For(lane, 0, block - bulk, ForKind.SERIAL, body(column, lane)[0])
        statements.append(rest)
    return statements


def is_zero(a: Any) -> bool:
    """Return whether an index is the literal 0."""
    return isinstance(a, int) and a == 0
