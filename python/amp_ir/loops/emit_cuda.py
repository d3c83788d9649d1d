# SPDX-License-Identifier: Apache-2.0
"""Turns a group into a CUDA kernel: one launch, or several where blocks must wait for each other.

    no reduction            every thread computes one vector of elements (`_flat_launch`)
    over columns            threads of a block share a row (`_rows_launch`); long rows that are few
                            are each shared by blocks, a launch a level (`_split_launches`)
    over rows               blocks share out the rows for a tile of columns (`_columns_launches`)
    over either             each block goes through some rows and keeps its own sums of the columns
                            (`_summed_rows_launches`)

Loads and stores are vectors of 16 bytes where the memory allows it; arithmetic is in the compute
dtype. What one block must tell another goes through scratch memory that the caller plans. All sums
are taken in a fixed order: the same input gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
from tvm import tirx
from tvm.tirx import For, ForKind

from amp_ir.loops.coordinates import Axis, Position, merged_axes
from amp_ir.loops.cuda_launch import (
    THREADS,
    WARP,
    ThreadAccumulator,
    guarded,
    kept_dtype,
    launch,
    loop,
    sequence,
    synchronise,
    unrolled,
)
from amp_ir.loops.grouping import Domain, Group
from amp_ir.loops.ir import Reduction, TensorSpec, compute_dtype
from amp_ir.loops.kernel import Kernel, unflatten_axes, with_pairs
from amp_ir.loops.kernel_buffers import FlatBuffer, dtype_nbytes
from amp_ir.loops.levels import Level, assign_levels, inplace_pairs
from amp_ir.loops.loop_domain import loop_domain
from amp_ir.loops.opaque_launches import emit_opaque
from amp_ir.loops.thread_writer import VECTOR_NBYTES, ThreadWriter

__all__ = ["emit_copy", "emit_group", "emit_opaque"]

# Elements a thread computes side by side at most: more would spill registers in long chains.
MAX_WIDTH = 8
# Vectors of a row that a thread goes through before more threads share the row.
VECTORS_A_THREAD = 4
MAX_THREADS = 1024
# Blocks that fill the largest GPUs (132 multiprocessors) a few times over. A constant, not asked of
# the device: sums must not depend on it.
MANY_BLOCKS = 528
# Rows fewer than this and longer than that are each shared by several blocks.
FEW_ROWS, LONG_ROW = 64, 16384
# Rows of threads in a tile that adds up over rows.
TILE_ROWS = 8
# Shared memory that every block may have without asking.
SHARED_NBYTES = 48 * 1024
# Elements of tensors that a thread holds at once: with more, registers do not suffice.
MAX_HELD = 64
# Running values of one thread that stay in registers.
MAX_RUNNING = 32

Take = Callable[[Any, Any], tirx.Stmt]


def emit_group(group: Group, *, strict: bool = False) -> Kernel:
    """Write the kernel of a group."""
    inputs = sorted(group.inputs.values(), key=lambda value: value.serial)
    buffers: dict[int, FlatBuffer] = {}
    for k, value in enumerate(inputs):
        buffers[id(value)] = FlatBuffer.declare(value.spec, f"in{k}")
    for k, value in enumerate(group.stored):
        buffers[id(value)] = FlatBuffer.declare(value.spec, f"out{k}")
    emitter = _Emitter(group, buffers, loop_domain(group), strict)
    body = sequence(emitter.launches())
    parameters = [buffers[id(value)].buffer for value in [*inputs, *group.stored]]
    parameters += [one.buffer for one in emitter.scratch]
    pairs = inplace_pairs(group, inputs)
    function = with_pairs(tirx.PrimFunc(parameters, body), pairs)
    scratch = tuple(one.spec for one in emitter.scratch)
    return Kernel(function, tuple(inputs), tuple(group.stored), scratch)


def emit_copy(size: int, dtype: str) -> tirx.PrimFunc:
    """Write a kernel (source, copy) for `size` elements of a physical dtype."""
    source = tirx.decl_buffer((size,), dtype, "source")
    copy = tirx.decl_buffer((size,), dtype, "copy")
    blocks = -(-size // THREADS)

    def body(block: Any, thread: Any) -> list[tirx.Stmt]:
        at = block * THREADS + thread
        store = tirx.BufferStore(copy, tirx.BufferLoad(source, [at]), [at])
        return guarded(at < size if size % THREADS else None, [store])

    function = tirx.PrimFunc([source, copy], launch(blocks, THREADS, body))
    return function.with_attr("tirx.noalias", True)


@attrs.define
class _Emitter:
    group: Group
    buffers: dict[int, FlatBuffer]
    domain: Domain
    strict: bool
    row_axes: list[Axis] = attrs.field(init=False)
    column_axes: list[Axis] = attrs.field(init=False)
    levels: list[Level] = attrs.field(init=False)
    width: int = attrs.field(init=False)
    scratch: list[FlatBuffer] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.row_axes, self.column_axes = merged_axes(self.domain)
        if not self.column_axes:
            self.column_axes = [Axis((), 1, 1)]
        self.levels = assign_levels(self.group)
        if self.domain.keeps_innermost:
            self.width = self._tile_width(self.row_axes[-1].extent, self.levels[0].reductions)
        elif self._only_sums_rows:
            self.width = self._tile_width(self.column_axes[-1].extent, self.levels[0].columns)
        else:
            self.width = self._width(self.column_axes[-1].extent)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return math.prod(axis.extent for axis in self.row_axes)

    @property
    def chunks(self) -> int:
        """Vectors in a row."""
        return math.prod(axis.extent for axis in self.column_axes) // self.width

    def launches(self) -> list[tirx.Stmt]:
        """The launches of the kernel, in order."""
        if self.domain.keeps_innermost or self._only_sums_rows:
            return self._columns_launches()
        if self.group.column:
            return self._summed_rows_launches()
        if not any(isinstance(value, Reduction) for value in self.group.row):
            return [self._flat_launch()]
        if self.rows < FEW_ROWS and self.domain.columns >= LONG_ROW:
            return self._split_launches()
        return [self._rows_launch()]

    def _width(self, extent: int) -> int:
        """Elements side by side: 16 bytes of the narrowest tensor, as far as they divide a row."""
        sizes = [
            dtype_nbytes(value.dtype)
            for value in [*self.group.inputs.values(), *self.group.stored]
            if value.size == self.domain.size
        ]
        width = min(MAX_WIDTH, VECTOR_NBYTES // min(sizes, default=4))
        while width > 1 and width * len(sizes) > MAX_HELD:
            width //= 2
        while extent % width:
            width //= 2
        return width

    @property
    def _only_sums_rows(self) -> bool:
        """Whether all that is reduced is reduced over the rows, and no value of a row is stored."""
        stored = {id(value) for value in self.group.stored}
        is_row_plain = not any(
            isinstance(value, Reduction) or id(value) in stored for value in self.group.row
        )
        return bool(self.group.column) and is_row_plain

    def _tile_width(self, extent: int, reductions: list[Reduction]) -> int:
        """The width at which a tile's sums still fit into shared memory."""
        width = self._width(extent)
        sizes = sum(dtype_nbytes(_kept_dtype(value)) for value in reductions)
        while width > 1 and sizes * TILE_ROWS * WARP * width > SHARED_NBYTES:
            width //= 2
        return width

    # No reduction.

    def _flat_launch(self) -> tirx.Stmt:
        total = self.rows * self.chunks
        blocks = -(-total // THREADS)
        (level,) = self.levels

        def body(block: Any, thread: Any) -> list[tirx.Stmt]:
            at = block * THREADS + thread if blocks > 1 else thread
            row, chunk = tirx.Var("row", "int32"), tirx.Var("chunk", "int32")
            parts = unflatten_axes(row, self.row_axes)
            row_elements: dict[int, Any] = {}
            is_first = tirx.EQ(chunk, tirx.const(0, "int32"))
            statements = [
                tirx.Bind(row, tirx.floordiv(at, self.chunks)),
                tirx.Bind(chunk, tirx.floormod(at, self.chunks)),
                *self._start_level(level, parts, row_elements, is_first),
                *self._chunk(level, parts, chunk, row_elements, []),
            ]
            return guarded(at < total if total % THREADS else None, [sequence(statements)])

        return launch(blocks, THREADS, body)

    # Rows: the threads of a block share one, or a warp or less has one of several.

    def _rows_launch(self) -> tirx.Stmt:
        threads = self._threads_of_row()
        together = max(1, THREADS // threads) if threads <= WARP else 1
        together = min(together, _power_of_two(self.rows))
        blocks = -(-self.rows // together)

        def body(block: Any, thread: Any) -> list[tirx.Stmt]:
            row = tirx.Var("row", "int32")
            at = block * together + tirx.floordiv(thread, threads) if together > 1 else block
            inside = None
            if self.rows % together:
                # All threads take part in shuffles; those without a row look at the last one.
                inside = at < self.rows
                at = tirx.min(at, self.rows - 1)
            mine = tirx.floormod(thread, threads) if together > 1 else thread
            rest = self._row_body(row, (mine, threads), inside)
            return [tirx.Bind(row, at), *rest]

        return launch(blocks, threads * together, body)

    def _threads_of_row(self) -> int:
        if self.chunks <= WARP:
            return _power_of_two(self.chunks)
        wanted = _power_of_two(-(-self.chunks // VECTORS_A_THREAD))
        return max(2 * WARP, min(MAX_THREADS, wanted))

    def _row_body(
        self, row: Any, share: tuple[Any, int], inside: Any, sums: Callable[..., Any] | None = None
    ) -> list[tirx.Stmt]:
        """One row by the threads of `share` (this thread, how many), level by level.

        `inside`: the condition under which the row is there; None: it is. `sums`: how elements of
        reductions over the rows are taken.
        """
        thread, threads = share
        parts = unflatten_axes(row, self.row_axes)
        row_elements: dict[int, Any] = {}
        statements: list[tirx.Stmt] = []
        is_first = tirx.EQ(thread, tirx.const(0, "int32"))
        for level in self.levels:
            statements += self._start_level(level, parts, row_elements, _both(is_first, inside))
            accumulators = {id(value): _accumulator(value) for value in level.reductions}
            for accumulator in accumulators.values():
                statements += accumulator.start()
            if level.stores or level.reductions or level.columns:
                takes = [(value, _adding(accumulators[id(value)])) for value in level.reductions]
                passes = self._shared_row(level, parts, row_elements, takes, share, sums)
                statements += guarded(inside, passes)
            for key, accumulator in accumulators.items():
                statements += accumulator.over_threads(threads, thread)
                row_elements[key] = _named(statements, accumulator.result())
        return statements

    def _shared_row(
        self,
        level: Level,
        parts: list[Any],
        row_elements: dict[int, Any],
        takes: list[tuple[Reduction, Take]],
        share: tuple[Any, int],
        sums: Callable[..., Any] | None = None,
    ) -> list[tirx.Stmt]:
        """Every `threads`-th chunk of a row, by this thread."""
        thread, threads = share
        steps = -(-self.chunks // threads)

        def visit(step: Any) -> list[tirx.Stmt]:
            chunk = tirx.Var("chunk", "int32")
            at = thread if steps == 1 else step * threads + thread
            taken = takes + ([] if sums is None else sums(level, step, chunk))
            body = self._chunk(level, parts, chunk, dict(row_elements), taken)
            inside = chunk < self.chunks if self.chunks % threads else None
            return [tirx.Bind(chunk, at), *guarded(inside, body)]

        if sums is not None and steps * self.width <= MAX_RUNNING:
            return unrolled(steps, "step", visit)
        return loop(steps, "step", visit)

    # Few long rows: blocks share each, and what they found is put together by the next launch.

    def _split_launches(self) -> list[tirx.Stmt]:
        threads = THREADS
        most = -(-self.chunks // threads)
        parts = max(1, min(-(-MANY_BLOCKS // self.rows), most, THREADS))
        partial = {
            id(value): self._scratch(self.rows * parts, _kept_dtype(value))
            for level in self.levels
            for value in level.reductions
        }
        return [
            self._split_launch(number, parts, partial)
            for number, level in enumerate(self.levels)
            if level.stores or level.reductions or self._stored_rows(level)
        ]

    def _split_launch(self, number: int, parts: int, partial: dict[int, FlatBuffer]) -> tirx.Stmt:
        level, threads = self.levels[number], THREADS
        is_shared = bool(level.stores or level.reductions)
        shares = parts if is_shared else 1

        def body(block: Any, thread: Any) -> list[tirx.Stmt]:
            row, part = tirx.Var("row", "int32"), tirx.Var("part", "int32")
            statements: list[tirx.Stmt] = [
                tirx.Bind(row, tirx.floordiv(block, shares)),
                tirx.Bind(part, tirx.floormod(block, shares)),
            ]
            row_elements: dict[int, Any] = {}
            for earlier in self.levels[:number]:
                for value in earlier.reductions:
                    buffer = partial[id(value)].buffer
                    statements += self._finish(value, buffer, row, parts, thread, row_elements)
            rows = unflatten_axes(row, self.row_axes)
            is_first = tirx.all(tirx.EQ(part, 0), tirx.EQ(thread, 0))
            statements += self._start_level(level, rows, row_elements, is_first)
            accumulators = {id(value): _accumulator(value) for value in level.reductions}
            for accumulator in accumulators.values():
                statements += accumulator.start()
            if is_shared:
                mine = part * threads + thread
                takes = [(value, _adding(accumulators[id(value)])) for value in level.reductions]
                share = (mine, threads * parts)
                statements += self._shared_row(level, rows, row_elements, takes, share)
            for key, accumulator in accumulators.items():
                statements += accumulator.over_threads(threads, thread)
                put = tirx.BufferStore(
                    partial[key].buffer,
                    tirx.BufferLoad(accumulator.running, [0]), [row * parts + part],
                )  # fmt: skip
                statements += guarded(tirx.EQ(thread, 0), [put])
            return statements

        return launch(self.rows * shares, threads, body)

    def _finish(
        self, value: Reduction, buffer: Any, row: Any, parts: int, thread: Any,
        row_elements: dict[int, Any],
    ) -> list[tirx.Stmt]:  # fmt: skip
        """Put together what the parts of a row found; every thread gets the result."""
        accumulator = _accumulator(value)
        statements = accumulator.start()
        load = tirx.BufferStore(
            accumulator.running, tirx.BufferLoad(buffer, [row * parts + thread]), [0]
        )
        statements += guarded(thread < parts, [load])
        statements += accumulator.over_threads(THREADS, thread)
        row_elements[id(value)] = _named(statements, accumulator.result())
        return statements

    # Rows that are also added up: each block has its own sums of the columns.

    def _summed_rows_launches(self) -> list[tirx.Stmt]:
        threads = max(WARP, self._threads_of_row())
        blocks = min(self.rows, MANY_BLOCKS // 2)
        share = -(-self.rows // blocks)
        blocks = -(-self.rows // share)
        steps = -(-self.chunks // threads)
        extent = self.chunks * self.width
        sums = [value for value in self.group.column if isinstance(value, Reduction)]
        stored = {id(s): self._scratch(blocks * extent, _kept_dtype(s)) for s in sums}
        in_registers = steps * self.width <= MAX_RUNNING

        def body(block: Any, thread: Any) -> list[tirx.Stmt]:
            running = {
                id(s): _accumulator(s, steps * self.width if in_registers else 1) for s in sums
            }
            statements: list[tirx.Stmt] = []
            if in_registers:
                for one in running.values():
                    statements += one.start()
            else:
                statements += _clear(sums, stored, (block, extent), (thread, threads))

            def takes(level: Level, step: Any, chunk: Any) -> list[tuple[Reduction, Take]]:
                if in_registers:
                    return [(s, _adding(running[id(s)], step * self.width)) for s in level.columns]
                start = block * extent + chunk * self.width
                return [(s, _adding_to(s, stored[id(s)].buffer, start)) for s in level.columns]

            item = tirx.Var("item", "int32")
            row = tirx.Var("row", "int32")
            inner = [
                tirx.Bind(row, block * share + item),
                *self._row_body(row, (thread, threads), None, takes),
                # The next row's sums go through the same shared memory.
                synchronise(),
            ]
            count = tirx.const(share, "int32")
            if self.rows % share:
                count = tirx.min(count, self.rows - block * share)
            statements.append(For(item, 0, count, ForKind.SERIAL, sequence(inner)))
            if in_registers:
                for s in sums:
                    target = (stored[id(s)].buffer, block * extent)
                    statements += self._put_sums(running[id(s)], target, steps, threads, thread)
            return statements

        def finished(value: Reduction) -> tirx.Stmt:
            buffer = self.buffers[id(value)]
            return _combine_parts(value, stored[id(value)].buffer, blocks, extent, buffer)

        return [launch(blocks, threads, body), *(finished(s) for s in sums)]

    def _put_sums(
        self, running: ThreadAccumulator, target: tuple[Any, Any], steps: int, threads: int,
        thread: Any,
    ) -> list[tirx.Stmt]:  # fmt: skip
        buffer, start = target

        def put(step: Any) -> list[tirx.Stmt]:
            chunk = step * threads + thread

            def one(lane: Any) -> list[tirx.Stmt]:
                element = tirx.BufferLoad(running.running, [step * self.width + lane])
                at = start + chunk * self.width + lane
                return [tirx.BufferStore(buffer, element, [at])]

            inside = chunk < self.chunks if self.chunks % threads else None
            return guarded(inside, unrolled(self.width, "lane", one))

        return unrolled(steps, "step", put)

    # Columns: the reduction runs over outer dimensions; one result per column of memory.

    def _columns_launches(self) -> list[tirx.Stmt]:
        (level,) = self.levels[:1]
        tile = self._tile(level)
        chunks = tile.axes[-1].extent // self.width
        tiles = -(-chunks // WARP)
        outer = math.prod(axis.extent for axis in tile.axes[:-1])
        parts = -(-MANY_BLOCKS // (outer * tiles))
        parts = max(1, min(parts, -(-tile.depth // (4 * TILE_ROWS))))
        stored = [self.buffers.get(id(value)) for value in tile.reductions]
        results = outer * chunks * self.width
        partial = [
            self._scratch(parts * results, _kept_dtype(value)) if parts > 1 else None
            for value in tile.reductions
        ]

        def body(block: Any, thread: Any) -> list[tirx.Stmt]:
            names = {n: tirx.Var(n, "int32") for n in ("part", "group", "chunk", "line")}
            group_and_part = tirx.floordiv(block, tiles)
            statements: list[tirx.Stmt] = [
                tirx.Bind(names["group"], tirx.floordiv(group_and_part, parts)),
                tirx.Bind(names["part"], tirx.floormod(group_and_part, parts)),
                tirx.Bind(
                    names["chunk"],
                    tirx.floormod(block, tiles) * WARP + tirx.floormod(thread, WARP),
                ),
                tirx.Bind(names["line"], tirx.floordiv(thread, WARP)),
            ]
            accumulators = [_accumulator(value, self.width) for value in tile.reductions]
            for accumulator in accumulators:
                statements += accumulator.start()
            inside = names["chunk"] < chunks if chunks % WARP else None
            takes = [
                (value, _adding(accumulator))
                for value, accumulator in zip(tile.reductions, accumulators, strict=True)
            ]
            statements += guarded(inside, self._tile_column(level, tile, takes, names, parts))
            # One result after the other through the same shared memory.
            shared = _TileMemory(names["line"], tirx.floormod(thread, WARP), self.width)
            start = (names["group"] * chunks + names["chunk"]) * self.width
            for accumulator, whole, some in zip(accumulators, stored, partial, strict=True):
                put = _putting(accumulator, whole, some, start, names["part"] * results)
                statements += shared.combine(accumulator, inside, put)
            return statements

        launches = [launch(outer * parts * tiles, WARP * TILE_ROWS, body)]
        for value, whole, some in zip(tile.reductions, stored, partial, strict=True):
            if some is not None and whole is not None:
                launches.append(_combine_parts(value, some.buffer, parts, results, whole))
        return launches

    def _tile(self, level: Level) -> _Tile:
        if self.domain.keeps_innermost:
            return _Tile(self.row_axes, self.column_axes, level.reductions, False)
        return _Tile(self.column_axes, self.row_axes, level.columns, True)

    def _tile_column(
        self,
        level: Level,
        tile: _Tile,
        takes: list[tuple[Reduction, Take]],
        names: dict[str, Any],
        parts: int,
    ) -> list[tirx.Stmt]:
        """What a thread of a tile adds up: every so many-th line of its columns."""
        stride = parts * TILE_ROWS
        steps = -(-tile.depth // stride)
        outer = unflatten_axes(names["group"], tile.axes[:-1])

        def visit(step: Any) -> list[tirx.Stmt]:
            at = tirx.Var("at", "int32")
            lane = tirx.Var("lane", "int32") if self.width > 1 else None
            inner = names["chunk"] * self.width + lane if lane is not None else names["chunk"]
            kept, reduced = [*outer, inner], unflatten_axes(at, tile.depth_axes)
            row, column = (reduced, kept) if tile.is_of_columns else (kept, reduced)
            writer = self._writer(row, column, {}, lane)
            self._visit(writer, level, takes)
            place = (step * parts + names["part"]) * TILE_ROWS + names["line"]
            inside = at < tile.depth if tile.depth % stride else None
            return [tirx.Bind(at, place), *guarded(inside, writer.statements())]

        return loop(steps, "step", visit)

    # Elements.

    def _start_level(
        self, level: Level, row: list[Any], row_elements: dict[int, Any], is_writer: Any
    ) -> list[tirx.Stmt]:
        """Values of the row, computed by every thread and stored by one."""
        writer = self._writer(row, None, row_elements, None)
        stores = []
        for value in level.row_values:
            element = writer.row(value)
            if id(value) in self.buffers and value in self.group.stored:
                flat = writer.position.flat_row()
                stores.append(self.buffers[id(value)].store(flat, element))
        return [*writer.scratch, *writer.body, *guarded(is_writer, stores)]

    def _stored_rows(self, level: Level) -> bool:
        return any(value in self.group.stored for value in level.row_values)

    def _chunk(
        self,
        level: Level,
        row: list[Any],
        chunk: Any,
        row_elements: dict[int, Any],
        takes: list[tuple[Reduction, Take]],
    ) -> list[tirx.Stmt]:
        """The vector of elements with number `chunk` of a row."""
        outer = self.column_axes[:-1]
        inner = self.column_axes[-1].extent // self.width
        lane = tirx.Var("lane", "int32") if self.width > 1 else None
        place = tirx.floormod(chunk, inner) if outer else chunk
        columns = unflatten_axes(tirx.floordiv(chunk, inner), outer) if outer else []
        column = place * self.width + lane if lane is not None else place
        writer = self._writer(row, [*columns, column], row_elements, lane)
        self._visit(writer, level, takes)
        return writer.statements()

    def _visit(
        self, writer: ThreadWriter, level: Level, takes: list[tuple[Reduction, Take]]
    ) -> None:
        """What happens at one element. All reads come before all stores: see `inplace_pairs`."""
        elements = [writer.full(value) for value in level.stores]
        taken = [(take, writer.reduced(value)) for value, take in takes]
        for value, element in zip(level.stores, elements, strict=True):
            writer.store(self.buffers[id(value)], element)
        lane = writer.lane if writer.lane is not None else 0
        for take, element in taken:
            writer.body.append(take(lane, element))

    def _writer(
        self, row: list[Any], column: list[Any] | None, row_elements: dict[int, Any], lane: Any
    ) -> ThreadWriter:
        axes = self.column_axes
        if column is not None and not axes[-1].dimensions:
            axes, column = [], []
        position = Position(self.domain, self.row_axes, axes, row, column)
        width = self.width if lane is not None else 1
        return ThreadWriter(
            self.group, self.buffers, position, row_elements, self.strict, lane, width=width
        )

    def _scratch(self, count: int, dtype: str) -> FlatBuffer:
        """Memory that blocks share, a parameter of the kernel."""
        name = f"scratch{len(self.scratch)}"
        buffer = FlatBuffer.declare(TensorSpec((count,), dtype), name)
        self.scratch.append(buffer)
        return buffer


@attrs.frozen
class _Tile:
    """What a sum over lines keeps (`axes`, the last one innermost in memory) and goes through.

    `is_of_columns`: the kept axes are the columns of the group's domain, else they are its rows.
    """

    axes: list[Axis]
    depth_axes: list[Axis]
    reductions: list[Reduction]
    is_of_columns: bool

    @property
    def depth(self) -> int:
        """Number of lines."""
        return math.prod(axis.extent for axis in self.depth_axes)


@attrs.define
class _TileMemory:
    """Shared memory through which the lines of a tile put their running values together."""

    line: Any
    lane: Any
    width: int

    def combine(
        self, accumulator: ThreadAccumulator, inside: Any, put: Callable[[Any], list[tirx.Stmt]]
    ) -> list[tirx.Stmt]:
        """Add up the lines of a tile, in order; the first line's threads `put` each column."""
        columns = WARP * self.width
        dtype = kept_dtype(accumulator.dtype)
        shared = tirx.decl_buffer((TILE_ROWS * columns,), dtype, "tile", scope="shared")

        def place(line: Any, at: Any) -> Any:
            # Lanes side by side, so that a warp's accesses fall into different banks.
            return line * columns + at * WARP + self.lane

        def write(at: Any) -> list[tirx.Stmt]:
            element = tirx.BufferLoad(accumulator.running, [at])
            return [tirx.BufferStore(shared, element, [place(self.line, at)])]

        def add(at: Any) -> list[tirx.Stmt]:
            def take(line: Any) -> list[tirx.Stmt]:
                element = tirx.BufferLoad(shared, [place(line + 1, at)])
                return [accumulator.add(accumulator.taken(element), at)]

            return [*unrolled(TILE_ROWS - 1, "line", take), *put(at)]

        is_first = _both(tirx.EQ(self.line, tirx.const(0, "int32")), inside)
        return [
            tirx.AllocBuffer(shared),
            *unrolled(self.width, "at", write),
            synchronise(),
            *guarded(is_first, unrolled(self.width, "at", add)),
        ]


def _combine_parts(
    value: Reduction, partial: tirx.Var, parts: int, extent: int, out: FlatBuffer
) -> tirx.Stmt:
    """A launch that adds up `parts` rows of `extent` partial results, in order."""
    tiles = -(-extent // WARP)

    def body(block: Any, thread: Any) -> list[tirx.Stmt]:
        line, lane = tirx.floordiv(thread, WARP), tirx.floormod(thread, WARP)
        column = tirx.Var("column", "int32")
        accumulator = _accumulator(value)
        inside = column < extent if extent % WARP else None

        def visit(step: Any) -> list[tirx.Stmt]:
            part = step * TILE_ROWS + line
            element = accumulator.taken(tirx.BufferLoad(partial, [part * extent + column]))
            is_there = part < parts if parts % TILE_ROWS else None
            return guarded(_both(inside, is_there), [accumulator.add(element)])

        def put(_at: Any) -> list[tirx.Stmt]:
            return [out.store(column, accumulator.result())]

        return [
            tirx.Bind(column, block * WARP + lane),
            *accumulator.start(),
            *loop(-(-parts // TILE_ROWS), "step", visit),
            *_TileMemory(line, lane, 1).combine(accumulator, inside, put),
        ]

    return launch(tiles, WARP * TILE_ROWS, body)


def _accumulator(value: Reduction, count: int = 1) -> ThreadAccumulator:
    """Registers for the running values of a reduction."""
    return ThreadAccumulator.declare(value.kind, compute_dtype(value.dtype), count)


def _accumulator_in(value: Reduction, buffer: tirx.Var) -> ThreadAccumulator:
    """Running values of a reduction that lie in `buffer`."""
    return ThreadAccumulator(value.kind, compute_dtype(value.dtype), buffer, 0)


def _kept_dtype(value: Reduction) -> str:
    """The dtype of a reduction's running values in memory."""
    return kept_dtype(compute_dtype(value.dtype))


def _putting(
    accumulator: ThreadAccumulator,
    whole: FlatBuffer | None,
    partial: FlatBuffer | None,
    start: Any,
    part_start: Any,
) -> Callable[[Any], list[tirx.Stmt]]:
    """Store a finished column, or this part's share of it."""

    def put(at: Any) -> list[tirx.Stmt]:
        if partial is not None:
            element = tirx.BufferLoad(accumulator.running, [at])
            return [tirx.BufferStore(partial.buffer, element, [part_start + start + at])]
        return [whole.store(start + at, accumulator.result(at))] if whole is not None else []

    return put


def _adding(accumulator: ThreadAccumulator, start: Any = None) -> Take:
    """Take elements into registers: into one running value, or into one for each lane."""

    def take(lane: Any, element: Any) -> tirx.Stmt:
        if start is not None:
            return accumulator.add(element, start + lane)
        return accumulator.add(element, lane if accumulator.count > 1 else 0)

    return take


def _adding_to(value: Reduction, buffer: tirx.Var, start: Any) -> Take:
    """Take elements into memory that only this thread uses while the rows last."""
    helper = _accumulator_in(value, buffer)
    return lambda lane, element: helper.add(element, start + lane)


def _clear(
    sums: list[Reduction], stored: dict[int, FlatBuffer], place: tuple[Any, int],
    share: tuple[Any, int],
) -> list[tirx.Stmt]:  # fmt: skip
    """Set a block's sums in memory to the neutral element, and wait for all of them."""
    block, extent = place
    thread, threads = share
    statements: list[tirx.Stmt] = []
    for value in sums:
        helper = _accumulator_in(value, stored[id(value)].buffer)

        def visit(step: Any, helper: ThreadAccumulator = helper) -> list[tirx.Stmt]:
            at = step * threads + thread
            inside = at < extent if extent % threads else None
            return guarded(inside, [helper.clear(block * extent + at)])

        statements += loop(-(-extent // threads), "step", visit)
    return [*statements, synchronise()]


def _named(statements: list[tirx.Stmt], element: Any) -> Any:
    """The element under a name, so that its registers may be used again."""
    if str(element.ty.dtype) == "bool":
        return element
    variable = tirx.Var("result", str(element.ty.dtype))
    statements.append(tirx.Bind(variable, element))
    return variable


def _both(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    return tirx.all(a, b)


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
