# SPDX-License-Identifier: Apache-2.0
"""CUDA launches of a group that is summed over lines, which blocks divide into tiles of columns."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
from tvm import tirx

from amp_ir.loops.codegen.accumulate_blocks import COLUMN_BLOCK
from amp_ir.loops.codegen.accumulators import ends_of_block
from amp_ir.loops.codegen.coordinates import Axis
from amp_ir.loops.codegen.kernel import unflatten_axes
from amp_ir.loops.codegen.kernel_buffers import FlatBuffer
from amp_ir.loops.codegen.levels import Level
from amp_ir.loops.cuda.group_elements import (
    MANY_BLOCKS,
    TILE_ROWS,
    GroupElements,
    Take,
    accumulator_in,
    accumulator_of,
    adding,
    both,
    kept_dtype_of,
    power_of_two,
    result_in,
    wide_accumulator_of,
)
from amp_ir.loops.cuda.launch import (
    THREADS,
    WARP,
    ThreadAccumulator,
    blocked,
    guarded,
    kept_dtype,
    launch,
    loop,
    synchronise,
    unrolled,
)
from amp_ir.loops.ir import Reduction

# Blocks of a sum that has so many lines, at most, before its threads take more lines each.
MOST_BLOCKS = 2048
# Lanes of a line of threads at least, and lines of a thread for which a block is worth it.
_FEWEST_LANES, _FEWEST_LINES = 8, 4
# Partial results that a thread adds up before more lines of threads share a column, and those at
# most: a block has no more threads.
_PARTS_A_THREAD, _MOST_LINES = 32, 32


@attrs.frozen
class _Tile:
    """The axes that a sum over lines keeps (`axes`, innermost in memory last) and those it reduces.

    `is_of_columns`: the remaining axes are the columns of the group's domain, else its rows.
    """

    axes: list[Axis]
    depth_axes: list[Axis]
    reductions: list[Reduction]
    is_of_columns: bool

    @property
    def depth(self) -> int:
        """Return the number of lines."""
        return math.prod(axis.extent for axis in self.depth_axes)


@attrs.define
class TileMemory:
    """Shared memory through which the lines of a tile combine their running values."""

    line: Any
    lane: Any
    width: int
    lines: int = TILE_ROWS

    def combine(
        self, accumulator: ThreadAccumulator, inside: Any, put: Callable[[Any], list[tirx.Stmt]]
    ) -> list[tirx.Stmt]:
        """Add up the lines of a tile, in order; the first line's threads `put` each column."""
        columns = WARP * self.width
        dtype = kept_dtype(accumulator.dtype)
        shared = tirx.decl_buffer((self.lines * columns,), dtype, "tile", scope="shared")

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

            return [*unrolled(self.lines - 1, "line", take), *put(at)]

        is_first = both(tirx.EQ(self.line, tirx.const(0, "int32")), inside)
        return [
            tirx.AllocBuffer(shared),
            *unrolled(self.width, "at", write),
            synchronise(),
            *guarded(is_first, unrolled(self.width, "at", add)),
        ]


@attrs.frozen
class _Share:
    """How the threads of all blocks divide a tile: `lanes` side by side, `lines` below each other.

    `parts` blocks take lines of the same columns: each thread takes every `stride`-th line.
    """

    lanes: int
    parts: int
    depth: int

    @classmethod
    def of(cls, chunks: int, depth: int, groups: int) -> _Share:
        """Return the shares of `depth` lines of `chunks` vectors, in each of `groups`.

        There are enough blocks to fill a GPU, and so many that a thread has no more lines than one
        running value may take, unless that is more than a thousand blocks.
        """
        lanes = min(WARP, max(_FEWEST_LANES, power_of_two(chunks)))
        lines = THREADS // lanes
        tiles = groups * -(-chunks // lanes)
        fill = -(-MANY_BLOCKS // tiles)
        short = min(-(-depth // (COLUMN_BLOCK * lines)), -(-MOST_BLOCKS // tiles))
        parts = max(1, min(max(fill, short), -(-depth // (_FEWEST_LINES * lines))))
        steps = -(-depth // (parts * lines))
        # Without a guard around its loads, the compiler begins the next line's before the sum.
        even = (n for n in range(steps, steps // 2, -1) if depth % (n * lines) == 0)
        steps = next(even, steps)
        return cls(lanes, -(-depth // (steps * lines)), depth)

    @property
    def lines(self) -> int:
        """Return the lines that the threads of a block take at once."""
        return THREADS // self.lanes

    @property
    def stride(self) -> int:
        """Return the lines that all blocks take at once."""
        return self.parts * self.lines

    @property
    def steps(self) -> int:
        """Return the most lines of a thread."""
        return -(-self.depth // self.stride)


def columns_launches(elements: GroupElements) -> list[tirx.Stmt]:
    """Emit a tile of columns and a part of the lines per block, then the sum of the parts."""
    (level,) = elements.levels[:1]
    tile = _tile_of(elements, level)
    chunks = tile.axes[-1].extent // elements.width
    outer = math.prod(axis.extent for axis in tile.axes[:-1])
    share = _Share.of(chunks, tile.depth, outer)
    lanes, parts = share.lanes, share.parts
    tiles = -(-chunks // lanes)
    stored = [elements.buffers.get(id(value)) for value in tile.reductions]
    results = outer * chunks * elements.width
    is_long = share.steps > COLUMN_BLOCK
    partial = [
        elements.make_workspace(parts * results, kept_dtype_of(value, is_long=is_long))
        if parts > 1
        else None
        for value in tile.reductions
    ]

    def body(block: Any, thread: Any) -> list[tirx.Stmt]:
        names = {n: tirx.Var(n, "int32") for n in ("part", "group", "chunk", "line")}
        group_and_part = tirx.floordiv(block, tiles)
        first_chunk = tirx.floormod(block, tiles) * lanes
        statements: list[tirx.Stmt] = [
            tirx.Bind(names["group"], tirx.floordiv(group_and_part, parts)),
            tirx.Bind(names["part"], tirx.floormod(group_and_part, parts)),
            tirx.Bind(names["chunk"], first_chunk + tirx.floormod(thread, lanes)),
            tirx.Bind(names["line"], tirx.floordiv(thread, lanes)),
        ]
        accumulators = [
            accumulator_of(value, elements.width, is_long=is_long) for value in tile.reductions
        ]
        for accumulator in accumulators:
            statements += accumulator.start()
        inside = names["chunk"] < chunks if chunks % lanes else None
        takes = [
            (value, adding(accumulator))
            for value, accumulator in zip(tile.reductions, accumulators, strict=True)
        ]
        flush = ends_of_block(accumulators)
        column = _tile_column(elements, level, tile, takes, names, share, flush)
        statements += guarded(inside, column)
        start = (names["group"] * chunks + first_chunk) * elements.width
        for value, accumulator, whole, some in zip(
            tile.reductions, accumulators, stored, partial, strict=True
        ):

            def put(
                column: Any, found: ThreadAccumulator, value: Reduction = value,
                whole: FlatBuffer | None = whole, some: FlatBuffer | None = some,
            ) -> list[tirx.Stmt]:  # fmt: skip
                at = start + column
                if some is not None:
                    kept = accumulator_in(value, some.buffer)
                    return [kept.put(found.result(), names["part"] * results + at)]
                return [] if whole is None else [whole.store(at, result_in(value, found))]

            end = (chunks - first_chunk) * elements.width if inside is not None else None
            statements += _over_lines(value, accumulator.totals, (thread, lanes), end, put)
        return statements

    launches = [launch(outer * parts * tiles, THREADS, body)]
    sums = [
        (value, some.buffer, whole)
        for value, whole, some in zip(tile.reductions, stored, partial, strict=True)
        if some is not None and whole is not None
    ]
    return [*launches, combine_parts(sums, parts, results)] if sums else launches


def _over_lines(
    value: Reduction,
    running: ThreadAccumulator,
    share: tuple[Any, int],
    end: Any | None,
    put: Callable[[Any, ThreadAccumulator], list[tirx.Stmt]],
) -> list[tirx.Stmt]:
    """Combine the running values of the lines of a block, in order; `put` each of its columns.

    Every thread has `running.count` columns of one line, side by side; columns from `end` on are
    none. Neighbours write neighbouring places, so that a warp's accesses fall into different banks.
    """
    thread, lanes = share
    width, lines = running.count, THREADS // lanes
    columns = lanes * width
    dtype = kept_dtype(running.dtype)
    shared = tirx.decl_buffer((lines * columns,), dtype, "tile", scope="shared")
    place = tirx.floordiv(thread, lanes) * columns + tirx.floormod(thread, lanes)

    def write(at: Any) -> list[tirx.Stmt]:
        element = tirx.BufferLoad(running.running, [at])
        return [tirx.BufferStore(shared, element, [place + at * lanes])]

    total = wide_accumulator_of(value)

    def add(line: Any) -> list[tirx.Stmt]:
        element = tirx.BufferLoad(shared, [line * columns + thread])
        return [total.add(running.taken(element))]

    column = tirx.floormod(thread, lanes) * width + tirx.floordiv(thread, lanes)
    has_column = thread < columns if columns < THREADS else None
    inside = both(has_column, None if end is None else column < end)
    assert columns <= THREADS, "a thread sums one column"
    return [
        tirx.AllocBuffer(shared),
        *unrolled(width, "at", write),
        synchronise(),
        *guarded(inside, [*total.start(), *unrolled(lines, "line", add), *put(column, total)]),
    ]


def _tile_of(elements: GroupElements, level: Level) -> _Tile:
    if elements.domain.keeps_innermost:
        return _Tile(elements.row_axes, elements.column_axes, level.reductions, False)
    return _Tile(elements.column_axes, elements.row_axes, level.columns, True)


def _tile_column(
    elements: GroupElements,
    level: Level,
    tile: _Tile,
    takes: list[tuple[Reduction, Take]],
    names: dict[str, Any],
    share: _Share,
    flush: list[tirx.Stmt],
) -> list[tirx.Stmt]:
    """Emit the sums of one thread of a tile: every so many-th line of its columns."""
    outer = unflatten_axes(names["group"], tile.axes[:-1])

    def visit(step: Any) -> list[tirx.Stmt]:
        at = tirx.Var("at", "int32")
        lane = tirx.Var("lane", "int32") if elements.width > 1 else None
        inner = names["chunk"] * elements.width + lane if lane is not None else names["chunk"]
        kept, reduced = [*outer, inner], unflatten_axes(at, tile.depth_axes)
        row, column = (reduced, kept) if tile.is_of_columns else (kept, reduced)
        writer = elements.writer(row, column, {}, lane)
        elements.visit(writer, level, takes)
        place = (step * share.parts + names["part"]) * share.lines + names["line"]
        inside = at < tile.depth if tile.depth % share.stride else None
        return [tirx.Bind(at, place), *guarded(inside, writer.statements())]

    return blocked(share.steps, COLUMN_BLOCK, visit, flush)


def combine_parts(
    sums: list[tuple[Reduction, tirx.Var, FlatBuffer]], parts: int, extent: int
) -> tirx.Stmt:
    """Return a launch that adds up `parts` rows of `extent` partial results, in order.

    `sums` are reductions with their partial and their own results; each has blocks of its own.
    """
    tiles = -(-extent // WARP)
    lines = min(_MOST_LINES, max(TILE_ROWS, power_of_two(-(-parts // _PARTS_A_THREAD))))

    def body(block: Any, thread: Any) -> list[tirx.Stmt]:
        column = tirx.Var("column", "int32")
        bound = tirx.Bind(column, tirx.floormod(block, tiles) * WARP + tirx.floormod(thread, WARP))
        if len(sums) == 1:
            return [bound, *_combine(sums[0], parts, extent, lines, (thread, column))]
        statements: list[tirx.Stmt] = [bound]
        for k, one in enumerate(sums):
            is_its = tirx.EQ(tirx.floordiv(block, tiles), tirx.const(k, "int32"))
            statements += guarded(is_its, _combine(one, parts, extent, lines, (thread, column)))
        return statements

    return launch(tiles * len(sums), WARP * lines, body)


def _combine(
    one: tuple[Reduction, tirx.Var, FlatBuffer],
    parts: int,
    extent: int,
    lines: int,
    place: tuple[Any, Any],
) -> list[tirx.Stmt]:
    """Add up one column of partial results: each line of threads some of them."""
    value, partial, out = one
    thread, column = place
    line = tirx.floordiv(thread, WARP)
    accumulator = wide_accumulator_of(value)
    kept = accumulator_in(value, partial)
    inside = column < extent if extent % WARP else None

    def visit(step: Any) -> list[tirx.Stmt]:
        part = step * lines + line
        element = kept.result(part * extent + column)
        is_there = part < parts if parts % lines else None
        return guarded(both(inside, is_there), [accumulator.add(element)])

    def put(_at: Any) -> list[tirx.Stmt]:
        return [out.store(column, result_in(value, accumulator))]

    memory = TileMemory(line, tirx.floormod(thread, WARP), 1, lines)
    return [
        *accumulator.start(),
        *loop(-(-parts // lines), "step", visit),
        *memory.combine(accumulator, inside, put),
    ]
