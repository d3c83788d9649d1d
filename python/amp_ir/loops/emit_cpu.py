# SPDX-License-Identifier: Apache-2.0
"""Turns a group into a CPU kernel: parallel over rows, vectorised along columns.

A row runs in levels. In each level one pass over the columns computes what it can, stores finished
elements and accumulates reductions; then the reductions are finished and the next level may read
them. Sums are accumulated in `LANES` partial sums that are added in a fixed order, so results do
not depend on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
from tvm import tirx
from tvm.tirx import For, ForKind

from amp_ir.loops.accumulators import Accumulator, ColumnSums
from amp_ir.loops.concatenation import concatenated, parts_of
from amp_ir.loops.coordinates import Axis, Position, merged_axes
from amp_ir.loops.element_writer import ElementWriter
from amp_ir.loops.group import Domain, Group
from amp_ir.loops.ir import LANES, Opaque, Pointwise, Reduction
from amp_ir.loops.kernel import GroupBuffers, Kernel, OpaqueBuffers, unflatten_axes
from amp_ir.loops.kernel_buffers import FlatBuffer
from amp_ir.loops.levels import Level, assign_levels
from amp_ir.loops.loop_domain import loop_domain
from amp_ir.loops.statements import sequence

LOOKS_AT_DISTANCES = False
# Elements a thread works on at least, so that a parallel launch (3 us) pays.
GRAIN = 8192
# Parts into which rows are cut when they are added up (fixed: the same sum always).
ROW_PARTS = 16
# A reduction of everything to one value is cut into this many parts (fixed: the same sum always).
PARTS = 64
COLUMN_BLOCKS = (128, 64, 32, 16)


def emit_group(group: Group, *, strict: bool = False) -> Kernel:
    """Write the kernel of a group."""
    buffers = GroupBuffers.declare(group)
    parts = parts_of(group, buffers.by_value)
    if parts is not None:
        value = group.stored[0]
        assert isinstance(value, Pointwise)
        out = buffers.by_value[id(value)]
        return buffers.finish(concatenated(parts, out, value.part_rows))
    domain = loop_domain(group)
    shape = _LoopShape(group, buffers.by_value, domain, strict)
    return buffers.finish(shape.columns_kernel() if domain.keeps_innermost else shape.rows_kernel())


def emit_opaque(results: list[Opaque]) -> Kernel:
    """Write the kernel whose results these are: its statements are for a CPU already."""
    kernel = results[0].kernel
    buffers = OpaqueBuffers.declare(kernel)
    return buffers.finish(kernel.emit(*buffers.arguments), results)


def emit_copy(size: int, dtype: str) -> tirx.PrimFunc:
    """Write a kernel (source, copy) for `size` elements of a physical dtype."""
    source = tirx.decl_buffer((size,), dtype, "source")
    copy = tirx.decl_buffer((size,), dtype, "copy")
    i = tirx.Var("i", "int32")
    store = tirx.BufferStore(copy, tirx.BufferLoad(source, [i]), [i])
    body = For(i, 0, size, ForKind.SERIAL, store)
    return tirx.PrimFunc([source, copy], body).with_attr("tirx.noalias", True)


@attrs.define
class _LoopShape:
    group: Group
    buffers: dict[int, FlatBuffer]
    domain: Domain
    strict: bool
    row_axes: list[Axis] = attrs.field(init=False)
    column_axes: list[Axis] = attrs.field(init=False)
    scratch: list[tirx.Stmt] = attrs.field(factory=list)
    column_sums: list[ColumnSums] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.row_axes, self.column_axes = merged_axes(self.domain)
        if not self.column_axes:
            self.column_axes = [Axis((), 1, 1)]

    # Rows: each row is done by one thread, level by level.

    def rows_kernel(self) -> tirx.Stmt:
        rows = math.prod(axis.extent for axis in self.row_axes)
        if rows == 1 and self.domain.size > 2 * GRAIN:
            return self._single_row_kernel()
        if self.group.column:
            return self._summed_rows_kernel(rows)
        row = tirx.Var("row", "int32")
        parts = unflatten_axes(row, self.row_axes)
        body = sequence(self._row_body(parts))
        is_parallel = self.domain.size > GRAIN and rows > 1
        return For(row, 0, rows, ForKind.PARALLEL if is_parallel else ForKind.SERIAL, body)

    def _row_body(self, row: list[Any]) -> list[tirx.Stmt]:
        row_elements: dict[int, Any] = {}
        statements: list[tirx.Stmt] = []
        for level in self._levels():
            statements += self._start_level(level, row, row_elements)
            accumulators = [Accumulator.declare(value) for value in level.reductions]
            for accumulator in accumulators:
                statements += accumulator.allocate()
            if level.stores or level.reductions or level.columns:
                statements += self._column_loops(level, row, row_elements, accumulators, None)
            for accumulator in accumulators:
                statements += accumulator.finish()
                row_elements[id(accumulator.value)] = accumulator.result()
        return self._with_scratch(statements)

    def _start_level(
        self, level: Level, row: list[Any], row_elements: dict[int, Any]
    ) -> list[tirx.Stmt]:
        writer = self._writer(row, None, row_elements)
        for value in level.row_values:
            element = writer.row(value)
            if value in self.group.stored:
                store = self.buffers[id(value)].store(writer.position.flat_row(), element)
                writer.body.append(store)
        return writer.body

    def _column_loops(
        self,
        level: Level,
        row: list[Any],
        row_elements: dict[int, Any],
        accumulators: list[Accumulator],
        inner_range: tuple[Any, int] | None,
    ) -> list[tirx.Stmt]:
        """Loops over the columns of one row, or over `inner_range` (start, extent) of its axis."""
        outer = [tirx.Var(f"c{d}", "int32") for d in range(len(self.column_axes) - 1)]
        inner_extent = self.column_axes[-1].extent
        start, extent = inner_range if inner_range is not None else (0, inner_extent)
        bulk = extent // LANES * LANES

        def body(column: Any, lane: Any | None) -> tuple[tirx.Stmt, bool]:
            writer = self._writer(row, [*outer, column], dict(row_elements), lane)
            return self._visit(writer, level, accumulators, lane), writer.is_scalar

        statements = _lane_loops(start, bulk, body)
        if bulk < extent:
            tail = tirx.Var("tail", "int32")
            at = start + bulk + tail if not _is_zero(start) or bulk else tail
            statements.append(For(tail, 0, extent - bulk, ForKind.SERIAL, body(at, None)[0]))
        for axis, variable in reversed(list(zip(self.column_axes[:-1], outer, strict=True))):
            loop = For(variable, 0, axis.extent, ForKind.SERIAL, sequence(statements))
            statements = [loop]
        return statements

    def _visit(
        self, writer: ElementWriter, level: Level, accumulators: list[Accumulator], lane: Any
    ) -> tirx.Stmt:
        """What happens at one element. All reads come before all stores: see `inplace_pairs`."""
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

    # Rows that are also added up: each part of the rows has its own sums, combined at the end.

    def _summed_rows_kernel(self, rows: int) -> tirx.Stmt:
        is_parallel = self.domain.size > GRAIN
        share = -(-rows // ROW_PARTS) if is_parallel else rows
        parts = -(-rows // share)
        part, row = tirx.Var("part", "int32"), tirx.Var("row", "int32")
        extent = self.domain.columns
        reductions = [value for value in self.group.column if isinstance(value, Reduction)]
        self.column_sums = [ColumnSums.declare(value, parts, extent) for value in reductions]
        at = part * share + row
        body: list[tirx.Stmt] = []
        for sums in self.column_sums:
            sums.part = part
            body += _block_loops(0, extent, _clearing(sums))
        inner = sequence(self._row_body(unflatten_axes(at, self.row_axes)))
        count = share if rows % share == 0 else tirx.min(share, rows - part * share)
        body.append(For(row, 0, count, ForKind.SERIAL, inner))
        kind = ForKind.PARALLEL if is_parallel else ForKind.SERIAL
        statements: list[tirx.Stmt] = [sums.allocation() for sums in self.column_sums]
        statements.append(For(part, 0, parts, kind, sequence(body)))
        for sums in self.column_sums:
            statements += _block_loops(0, extent, _storing(sums, self.buffers[id(sums.value)]))
        return sequence(statements)

    # One row: its columns are shared out among the threads, level by level.

    def _single_row_kernel(self) -> tirx.Stmt:
        row: list[Any] = [0 for _ in self.row_axes]
        row_elements: dict[int, Any] = {}
        statements: list[tirx.Stmt] = []
        for level in self._levels():
            statements += self._start_level(level, row, row_elements)
            if level.stores or level.reductions:
                statements += self._parallel_level(level, row, row_elements)
        return sequence(self._with_scratch(statements))

    def _parallel_level(
        self, level: Level, row: list[Any], row_elements: dict[int, Any]
    ) -> list[tirx.Stmt]:
        extent = self.column_axes[-1].extent
        size = -(-extent // (PARTS * LANES)) * LANES
        parts = extent // size
        partial = [Accumulator.declare(value) for value in level.reductions]
        shared = [Accumulator.declare_shared(value, parts) for value in level.reductions]
        part = tirx.Var("part", "int32")
        body: list[tirx.Stmt] = []
        for accumulator in partial:
            body += accumulator.allocate()
        body += self._column_loops(level, row, row_elements, partial, (part * size, size))
        for accumulator, whole in zip(partial, shared, strict=True):
            body += accumulator.finish()
            body.append(whole.put(part, accumulator.result()))
        body = self._with_scratch(body)
        statements: list[tirx.Stmt] = [whole.declaration() for whole in shared]
        statements.append(For(part, 0, parts, ForKind.PARALLEL, sequence(body)))
        rest = [Accumulator.declare(value) for value in level.reductions]
        for accumulator in rest:
            statements += accumulator.allocate()
        if extent > parts * size:
            bounds = (parts * size, extent - parts * size)
            statements += self._column_loops(level, row, row_elements, rest, bounds)
        for accumulator, whole in zip(rest, shared, strict=True):
            statements += accumulator.finish(whole)
            row_elements[id(accumulator.value)] = accumulator.result()
        return statements

    # Columns: the reduction runs over outer dimensions; one result per column of memory.

    def columns_kernel(self) -> tirx.Stmt:
        inner = self.row_axes[-1]
        block = next((b for b in COLUMN_BLOCKS if inner.extent >= b), 1)
        whole = inner.extent // block * block
        statements: list[tirx.Stmt] = []
        outer_rows = math.prod(axis.extent for axis in self.row_axes[:-1])
        if whole:
            task = tirx.Var("task", "int32")
            blocks = whole // block
            outer = unflatten_axes(_div(task, blocks), self.row_axes[:-1])
            start = tirx.floormod(task, blocks) * block if blocks > 1 else 0
            body = sequence(self._column_block(outer, start, block))
            is_parallel = self.domain.size > GRAIN and outer_rows * blocks > 1
            kind = ForKind.PARALLEL if is_parallel else ForKind.SERIAL
            statements.append(For(task, 0, outer_rows * blocks, kind, body))
        if whole < inner.extent:
            task = tirx.Var("rest", "int32")
            outer = unflatten_axes(task, self.row_axes[:-1])
            body = sequence(self._column_block(outer, whole, inner.extent - whole))
            statements.append(For(task, 0, outer_rows, ForKind.SERIAL, body))
        return sequence(statements)

    def _column_block(self, outer: list[Any], start: Any, block: int) -> list[tirx.Stmt]:
        level = self._levels()[0]
        accumulators = [Accumulator.declare(value, block) for value in level.reductions]
        statements: list[tirx.Stmt] = []
        for accumulator in accumulators:
            statements += accumulator.allocate()
        columns = [tirx.Var(f"r{d}", "int32") for d in range(len(self.column_axes))]

        def visit(offset: Any, lane: Any) -> tuple[tirx.Stmt, bool]:
            writer = self._writer([*outer, offset], list(columns), {}, lane)
            written = self._visit(writer, level, accumulators, _minus(offset, start))
            return written, writer.is_scalar

        inner = _block_loops(start, block, visit)
        for axis, variable in reversed(list(zip(self.column_axes, columns, strict=True))):
            inner = [For(variable, 0, axis.extent, ForKind.SERIAL, sequence(inner))]
        statements += inner

        def finish(offset: Any, lane: Any) -> tuple[tirx.Stmt, bool]:
            writer = self._writer([*outer, offset], None, {})
            for accumulator in accumulators:
                element = accumulator.at(_minus(offset, start))
                buffer = self.buffers.get(id(accumulator.value))
                if buffer is not None:
                    flat = writer.position.flat_row()
                    writer.body.append(buffer.store(flat, element))
            return sequence(writer.body), False

        return self._with_scratch(statements + _block_loops(start, block, finish))

    def _writer(
        self,
        row: list[Any],
        column: list[Any] | None,
        row_elements: dict[int, Any],
        lane: Any = None,
    ) -> ElementWriter:
        axes = self.column_axes
        if column is not None and not axes[-1].dimensions:
            axes, column = [], []
        position = Position(self.domain, self.row_axes, axes, row, column)
        writer = ElementWriter(self.group, self.buffers, position, row_elements, self.strict, lane)
        writer.scratch = self.scratch
        return writer

    def _with_scratch(self, statements: list[tirx.Stmt]) -> list[tirx.Stmt]:
        """Put the scratch memory that writing `statements` asked for before them."""
        allocations = list(self.scratch)
        self.scratch.clear()
        return allocations + statements

    def _levels(self) -> list[Level]:
        return assign_levels(self.group)


def _clearing(sums: ColumnSums) -> Body:
    return lambda column, _lane: (sums.clear(column), False)


def _storing(sums: ColumnSums, buffer: FlatBuffer) -> Body:
    def body(column: Any, _lane: Any) -> tuple[tirx.Stmt, bool]:
        return sequence([*sums.fold(column), buffer.store(column, sums.total(column))]), False

    return body


Body = Callable[[Any, Any], "tuple[tirx.Stmt, bool]"]


def _lane_loops(start: Any, extent: int, body: Body) -> list[tirx.Stmt]:
    """A loop over `extent` columns (a multiple of LANES) in vectors.

    `body(column, lane)` gives the statement, and whether it can only run lane by lane.
    """
    if not extent:
        return []
    step, lane = tirx.Var("step", "int32"), tirx.Var("lane", "int32")
    at = step * LANES + lane if extent > LANES else lane
    column = at if _is_zero(start) else start + at
    statement, is_scalar = body(column, lane)
    kind = ForKind.SERIAL if is_scalar else ForKind.VECTORIZED
    vector = For(lane, 0, LANES, kind, statement)
    if extent == LANES:
        return [vector]
    return [For(step, 0, extent // LANES, ForKind.SERIAL, vector)]


def _block_loops(start: Any, block: int, body: Body) -> list[tirx.Stmt]:
    """A loop over `block` columns from `start`, in vectors as far as they go."""
    bulk = block // LANES * LANES
    statements = _lane_loops(start, bulk, body)
    if bulk < block:
        lane = tirx.Var("lane", "int32")
        at = bulk + lane if bulk else lane
        column = at if _is_zero(start) else start + at
        rest = For(lane, 0, block - bulk, ForKind.SERIAL, body(column, lane)[0])
        statements.append(rest)
    return statements


def _div(a: Any, b: int) -> Any:
    return a if b == 1 else tirx.floordiv(a, b)


def _minus(a: Any, b: Any) -> Any:
    return a if _is_zero(b) else a - b


def _is_zero(a: Any) -> bool:
    return isinstance(a, int) and a == 0
