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
    result_in,
    wide_accumulator_of,
)
from amp_ir.loops.cuda.launch import (
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

        is_first = both(tirx.EQ(self.line, tirx.const(0, "int32")), inside)
        return [
            tirx.AllocBuffer(shared),
            *unrolled(self.width, "at", write),
            synchronise(),
            *guarded(is_first, unrolled(self.width, "at", add)),
        ]


def columns_launches(elements: GroupElements) -> list[tirx.Stmt]:
    """Emit a tile of columns and a part of the lines per block, then the sum of the parts."""
    (level,) = elements.levels[:1]
    tile = _tile_of(elements, level)
    chunks = tile.axes[-1].extent // elements.width
    tiles = -(-chunks // WARP)
    outer = math.prod(axis.extent for axis in tile.axes[:-1])
    parts = -(-MANY_BLOCKS // (outer * tiles))
    parts = max(1, min(parts, -(-tile.depth // (4 * TILE_ROWS))))
    stored = [elements.buffers.get(id(value)) for value in tile.reductions]
    results = outer * chunks * elements.width
    is_long = -(-tile.depth // (parts * TILE_ROWS)) > COLUMN_BLOCK
    partial = [
        elements.make_workspace(parts * results, kept_dtype_of(value, is_long=is_long))
        if parts > 1
        else None
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
        accumulators = [
            accumulator_of(value, elements.width, is_long=is_long) for value in tile.reductions
        ]
        for accumulator in accumulators:
            statements += accumulator.start()
        inside = names["chunk"] < chunks if chunks % WARP else None
        takes = [
            (value, adding(accumulator))
            for value, accumulator in zip(tile.reductions, accumulators, strict=True)
        ]
        flush = ends_of_block(accumulators)
        column = _tile_column(elements, level, tile, takes, names, parts, flush)
        statements += guarded(inside, column)
        # One result after the other through the same shared memory.
        shared = TileMemory(names["line"], tirx.floormod(thread, WARP), elements.width)
        start = (names["group"] * chunks + names["chunk"]) * elements.width
        for (value, _), accumulator, whole, some in zip(
            takes, accumulators, stored, partial, strict=True
        ):
            put = _putting(value, accumulator, whole, some, start, names["part"] * results)
            statements += shared.combine(accumulator.totals, inside, put)
        return statements

    launches = [launch(outer * parts * tiles, WARP * TILE_ROWS, body)]
    for value, whole, some in zip(tile.reductions, stored, partial, strict=True):
        if some is not None and whole is not None:
            launches.append(combine_parts(value, some.buffer, parts, results, whole))
    return launches


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
    parts: int,
    flush: list[tirx.Stmt],
) -> list[tirx.Stmt]:
    """Emit the sums of one thread of a tile: every so many-th line of its columns."""
    stride = parts * TILE_ROWS
    steps = -(-tile.depth // stride)
    outer = unflatten_axes(names["group"], tile.axes[:-1])

    def visit(step: Any) -> list[tirx.Stmt]:
        at = tirx.Var("at", "int32")
        lane = tirx.Var("lane", "int32") if elements.width > 1 else None
        inner = names["chunk"] * elements.width + lane if lane is not None else names["chunk"]
        kept, reduced = [*outer, inner], unflatten_axes(at, tile.depth_axes)
        row, column = (reduced, kept) if tile.is_of_columns else (kept, reduced)
        writer = elements.writer(row, column, {}, lane)
        elements.visit(writer, level, takes)
        place = (step * parts + names["part"]) * TILE_ROWS + names["line"]
        inside = at < tile.depth if tile.depth % stride else None
        return [tirx.Bind(at, place), *guarded(inside, writer.statements())]

    return blocked(steps, COLUMN_BLOCK, visit, flush)


def combine_parts(
    value: Reduction, partial: tirx.Var, parts: int, extent: int, out: FlatBuffer
) -> tirx.Stmt:
    """Return a launch that adds up `parts` rows of `extent` partial results, in order."""
    tiles = -(-extent // WARP)

    def body(block: Any, thread: Any) -> list[tirx.Stmt]:
        line, lane = tirx.floordiv(thread, WARP), tirx.floormod(thread, WARP)
        column = tirx.Var("column", "int32")
        accumulator = wide_accumulator_of(value)
        kept = accumulator_in(value, partial)
        inside = column < extent if extent % WARP else None

        def visit(step: Any) -> list[tirx.Stmt]:
            part = step * TILE_ROWS + line
            element = kept.result(part * extent + column)
            is_there = part < parts if parts % TILE_ROWS else None
            return guarded(both(inside, is_there), [accumulator.add(element)])

        def put(_at: Any) -> list[tirx.Stmt]:
            return [out.store(column, result_in(value, accumulator))]

        return [
            tirx.Bind(column, block * WARP + lane),
            *accumulator.start(),
            *loop(-(-parts // TILE_ROWS), "step", visit),
            *TileMemory(line, lane, 1).combine(accumulator, inside, put),
        ]

    return launch(tiles, WARP * TILE_ROWS, body)


def _putting(
    value: Reduction,
    accumulator: ThreadAccumulator,
    whole: FlatBuffer | None,
    partial: FlatBuffer | None,
    start: Any,
    part_start: Any,
) -> Callable[[Any], list[tirx.Stmt]]:
    """Store a finished column, or this part's share of it."""

    def put(at: Any) -> list[tirx.Stmt]:
        if partial is not None:
            element = tirx.BufferLoad(accumulator.totals.running, [at])
            return [tirx.BufferStore(partial.buffer, element, [part_start + start + at])]
        element = result_in(value, accumulator, at)
        return [whole.store(start + at, element)] if whole is not None else []

    return put
