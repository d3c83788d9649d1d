# SPDX-License-Identifier: Apache-2.0
"""The gradient of a table on a GPU: rows added in a fixed order, so that results are deterministic.

Work is divided evenly however often an id occurs: all tokens may have one type.

    1. the items are ranked by their id; equal ids keep their order
    2. a block adds up a chunk of the sorted items. It adds an id whose items are all in the chunk
       to the table, and writes the sums of others, of which a chunk has at most two, to workspace
    3. the block of the chunk in which such an id begins adds up its parts, and adds them to the
       table

No two blocks write the same row, and no atomic operation decides an order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
from tvm import tirx

from amp_ir.ir.tensor_layout import physical_dtype
from amp_ir.loops import math as m
from amp_ir.loops.codegen.kernel_buffers import FlatBuffer, narrow, widen
from amp_ir.loops.codegen.statements import sequence
from amp_ir.loops.cuda.group_elements import MANY_BLOCKS, TILE_ROWS
from amp_ir.loops.cuda.launch import (
    THREADS,
    WARP,
    ThreadAccumulator,
    guarded,
    launch,
    local_buffer,
    loop,
    unrolled,
)
from amp_ir.loops.cuda.tiles import TileMemory
from amp_ir.loops.ir import TensorSpec, compute_dtype
from amp_ir.loops.table_sum import TableSum

# Sorted items that a block adds up: their rows are loaded at once, into registers.
_CHUNK = 16
# Columns of a thread: 16 bytes of float32.
_WIDTH = 4
# Items that a warp ranks at once: each id that it loads is compared with all of them.
_RANKED = 4
# Targets of a sorted item beside rows of the table and of the partial sums.
_NOT_LAST, _NOWHERE = -1, -2


def scatter_launches(table: TableSum) -> list[tirx.Stmt]:
    """Emit the launches that compute a table.

    The table is accumulated in float32 or wider; a low dtype is rounded once at the end.
    """
    out, base = table.out, table.base
    total, statements = out, []
    dtype = compute_dtype(out.spec.dtype)
    if out.spec.dtype != dtype:
        total = FlatBuffer.declare(TensorSpec(out.spec.shape, dtype), "total")
        statements.append(tirx.AllocBuffer(total.buffer))
    statements.append(_copy(base, total) if base is not None else _clear(total))
    if table.reaches_all is not None:
        statements.append(_of_none(table, total))
    if table.items and total.spec.size:
        scatter = _Scatter(table, total)
        statements += [*scatter.allocations(), *scatter.launches()]
    if total is not out:
        statements.append(_copy(total, out))
    return statements


def _clear(table: FlatBuffer) -> tirx.Stmt:
    zero = m.constant(0.0, table.spec.dtype)
    return _for_each(table, lambda at, width: _stored(table, at, width, lambda _lane: zero))


def _copy(source: FlatBuffer, target: FlatBuffer) -> tirx.Stmt:
    """Convert a table; in place this is nothing to do, which only the running kernel knows."""

    def move(at: Any, width: int) -> list[tirx.Stmt]:
        loads, element = _loaded(source, at, width)
        return [*loads, *_stored(target, at, width, element)]

    places = [
        tirx.call_pure_extern(
            "uint64",
            "reinterpret_cast<unsigned long long>",
            tirx.call_intrin("handle", "tirx.address_of", tirx.BufferLoad(one.buffer, [0])),
        )
        for one in (source, target)
    ]
    is_elsewhere = None
    if source.spec.dtype == target.spec.dtype:
        is_elsewhere = tirx.NE(*places)
    return _for_each(target, move, is_elsewhere)


def _of_none(table: TableSum, total: FlatBuffer) -> tirx.Stmt:
    """Put NaN in the rows whose id does not occur, where a factor makes that of their zeros.

    Training is over then: each element looks for its id among all items.
    """

    def add(at: Any, _width: int) -> list[tirx.Stmt]:
        row = tirx.Var("row", "int32")
        found = ThreadAccumulator.declare("sum", "int32", 1)

        def look(item: Any) -> list[tirx.Stmt]:
            id_ = table.id_of(item)
            occurs = tirx.all(table.counts(id_), tirx.EQ(id_, row))
            return [found.add(_one_where(occurs))]

        taken = total.store(at, m.constant(math.nan, total.spec.dtype))
        return [
            tirx.Bind(row, tirx.floordiv(at, table.width)),
            *found.start(),
            *(loop(table.items, "item", look) if table.items else []),
            *guarded(tirx.EQ(found.result(), 0), [taken]),
        ]

    return _for_each(total, add, table.reaches_all, 1)


def _for_each(
    table: FlatBuffer,
    body: Callable[[Any, int], list[tirx.Stmt]],
    condition: Any = None,
    width: int | None = None,
) -> tirx.Stmt:
    """Emit `body(at, width)` for each vector of elements, in blocks that all run at once."""
    width = _width_of(table.spec.size) if width is None else width
    count = table.spec.size // width
    blocks = max(1, min(-(-count // THREADS), 2 * MANY_BLOCKS))
    stride = blocks * THREADS

    def task(block: Any, thread: Any) -> list[tirx.Stmt]:
        def visit(step: Any) -> list[tirx.Stmt]:
            at = tirx.Var("at", "int32")
            inside = at < count if count % stride else None
            own = step * stride + block * THREADS + thread
            return [tirx.Bind(at, own), *guarded(inside, body(at * width, width))]

        return guarded(condition, loop(-(-count // stride), "step", visit))

    return launch(blocks, THREADS, task)


def _width_of(extent: int) -> int:
    return _WIDTH if extent % _WIDTH == 0 else 1


def _at(start: Any, width: int) -> Any:
    return tirx.Ramp(start, 1, width) if width > 1 else start


def _loaded(
    source: FlatBuffer, start: Any, width: int
) -> tuple[list[tirx.Stmt], Callable[[Any], Any]]:
    """Load `width` elements at once; return the statements, and the element of a lane."""
    dtype = source.spec.dtype
    held = local_buffer(width, physical_dtype(dtype), "loaded")
    load = tirx.BufferLoad(source.buffer, [_at(start, width)])
    store = tirx.BufferStore(held, load, [_at(tirx.const(0, "int32"), width)])
    return [tirx.AllocBuffer(held), store], lambda lane: widen(tirx.BufferLoad(held, [lane]), dtype)


def _stored(
    target: FlatBuffer, start: Any, width: int, element: Callable[[Any], Any]
) -> list[tirx.Stmt]:
    """Store `width` elements at once."""
    dtype = target.spec.dtype
    held = local_buffer(width, physical_dtype(dtype), "stored")

    def one(lane: Any) -> list[tirx.Stmt]:
        return [tirx.BufferStore(held, narrow(element(lane), dtype), [lane])]

    load = tirx.BufferLoad(held, [_at(tirx.const(0, "int32"), width)])
    return [
        tirx.AllocBuffer(held),
        *unrolled(width, "lane", one),
        tirx.BufferStore(target.buffer, load, [_at(start, width)]),
    ]


@attrs.define
class _Scatter:
    """The launches that add the rows of a table's items to `total`, and their workspace.

    `order`: the items, sorted. `targets`: for each sorted item that is the last one of its id in
    its chunk, the row that takes their sum: of the table, or beyond it of `partial`, which has two
    rows for each chunk: of the id that began before, and of the one that continues after it.
    `spans`: for each chunk, in how many more the id of its last item continues that begins in it.
    """

    table: TableSum
    total: FlatBuffer
    count: int = attrs.field(init=False)
    chunks: int = attrs.field(init=False)
    rows: int = attrs.field(init=False)
    columns: int = attrs.field(init=False)
    width: int = attrs.field(init=False)
    order: FlatBuffer = attrs.field(init=False)
    targets: FlatBuffer = attrs.field(init=False)
    spans: FlatBuffer = attrs.field(init=False)
    partial: FlatBuffer = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.count = self.table.items
        self.chunks = -(-self.count // _CHUNK)
        self.rows, self.columns = self.table.height, self.table.width
        self.width = _width_of(self.columns)
        self.order = FlatBuffer.declare(TensorSpec((self.count,), "int32"), "order")
        self.targets = FlatBuffer.declare(TensorSpec((self.count,), "int32"), "targets")
        self.spans = FlatBuffer.declare(TensorSpec((self.chunks,), "int32"), "spans")
        # In no other order do roundings stay few, however often an id occurs: so float64.
        parts = TensorSpec((2 * self.chunks * self.columns,), "float64")
        self.partial = FlatBuffer.declare(parts, "partial")

    def allocations(self) -> list[tirx.Stmt]:
        """Allocate the workspace."""
        buffers = (self.order, self.targets, self.spans, self.partial)
        return [tirx.AllocBuffer(one.buffer) for one in buffers]

    def launches(self) -> list[tirx.Stmt]:
        """Emit the launches, in order."""
        return [self._rank(), self._add_chunks(), self._add_parts()]

    def _rank(self) -> tirx.Stmt:
        """Emit the ranks of the items: a warp compares a few of them with all others."""
        together = THREADS // WARP * _RANKED

        def body(block: Any, thread: Any) -> list[tirx.Stmt]:
            first, lane = tirx.Var("first", "int32"), tirx.floormod(thread, WARP)
            own = local_buffer(_RANKED, "int32", "own")
            # Items with a lower id, with the same, and of these the earlier ones.
            lower, same, earlier = (
                ThreadAccumulator.declare("sum", "int32", _RANKED) for _ in range(3)
            )
            counters = (lower, same, earlier)

            def load(at: Any) -> list[tirx.Stmt]:
                item = m.clamp(first + at, self.count)
                return [tirx.BufferStore(own, self.table.id_of(item), [at])]

            def look(step: Any) -> list[tirx.Stmt]:
                other, its = tirx.Var("other", "int32"), tirx.Var("its", "int32")

                def compare(at: Any) -> list[tirx.Stmt]:
                    mine = tirx.BufferLoad(own, [at])
                    is_same = tirx.EQ(its, mine)
                    return [
                        lower.add(_one_where(its < mine), at),
                        same.add(_one_where(is_same), at),
                        earlier.add(_one_where(tirx.all(is_same, other < first + at)), at),
                    ]

                found = [tirx.Bind(its, self.table.id_of(other)), *unrolled(_RANKED, "at", compare)]
                inside = other < self.count if self.count % WARP else None
                return [tirx.Bind(other, step * WARP + lane), *guarded(inside, found)]

            def put(at: Any) -> list[tirx.Stmt]:
                inside = first + at < self.count if self.count % _RANKED else None
                counts = [one.result(at) for one in counters]
                return guarded(inside, self._put(first + at, tirx.BufferLoad(own, [at]), *counts))

            statements: list[tirx.Stmt] = [
                tirx.Bind(first, (block * THREADS + thread) // WARP * _RANKED),
                tirx.AllocBuffer(own),
                *unrolled(_RANKED, "at", load),
            ]
            for one in counters:
                statements += one.start()
            statements += loop(-(-self.count // WARP), "step", look)
            for at in range(_RANKED):
                for one in counters:
                    statements += one.over_threads(WARP, thread, at)
            # One lane puts them all: to take one a lane would index registers by the lane.
            is_first = tirx.EQ(lane, tirx.const(0, "int32"))
            if self.count % together:
                is_first = tirx.all(is_first, first < self.count)
            return [*statements, *guarded(is_first, unrolled(_RANKED, "at", put))]

        return launch(-(-self.count // together), THREADS, body)

    def _put(self, item: Any, own: Any, lower: Any, same: Any, earlier: Any) -> list[tirx.Stmt]:
        """Emit what the later launches must know of an item."""
        names = {n: tirx.Var(n, "int32") for n in ("begin", "end", "rank", "chunk", "target")}
        begin, end, rank, chunk, target = names.values()
        start = chunk * _CHUNK
        begins, ends = begin >= start, end <= start + _CHUNK
        counts = self.table.counts(own)
        part = tirx.Select(begins, tirx.const(1, "int32"), tirx.const(0, "int32"))
        whole = tirx.Select(tirx.all(begins, ends), own, self.rows + 2 * chunk + part)
        summed = tirx.Select(counts, whole, tirx.const(_NOWHERE, "int32"))
        is_last_of_chunk = tirx.EQ(rank, tirx.min(start + _CHUNK, self.count) - 1)
        is_last = tirx.any(is_last_of_chunk, tirx.EQ(rank, end - 1))
        zero = tirx.const(0, "int32")
        continues = tirx.all(begins, counts)
        more = tirx.Select(continues, tirx.floordiv(end - 1, _CHUNK) - chunk, zero)
        return [
            tirx.Bind(begin, lower),
            tirx.Bind(end, lower + same),
            tirx.Bind(rank, lower + earlier),
            tirx.Bind(chunk, tirx.floordiv(rank, _CHUNK)),
            tirx.Bind(target, tirx.Select(is_last, summed, tirx.const(_NOT_LAST, "int32"))),
            self.order.store(rank, item),
            self.targets.store(rank, target),
            *guarded(is_last_of_chunk, [self.spans.store(chunk, more)]),
        ]

    def _add_chunks(self) -> tirx.Stmt:
        """Emit the sums of each chunk: its rows are loaded first, and then added."""
        vectors = self.columns // self.width
        threads = min(THREADS, -(-vectors // WARP) * WARP)
        tiles = -(-vectors // threads)

        def body(block: Any, thread: Any) -> list[tirx.Stmt]:
            start, column = tirx.Var("start", "int32"), tirx.Var("column", "int32")
            vector = tirx.floormod(block, tiles) * threads + thread
            inside = column < self.columns if vectors % threads else None
            dtype = self.table.rows.spec.dtype
            held = local_buffer(_CHUNK * self.width, physical_dtype(dtype), "held")
            target = local_buffer(_CHUNK, "int32", "target")
            running = ThreadAccumulator.declare("sum", "float64", self.width)

            def load(k: Any) -> list[tirx.Stmt]:
                item = self.order.load(start + k)
                row = tirx.BufferLoad(
                    self.table.rows.buffer, [_at(item * self.columns + column, self.width)]
                )
                fetch = [
                    tirx.BufferStore(target, self.targets.load(start + k), [k]),
                    tirx.BufferStore(held, row, [_at(k * self.width, self.width)]),
                ]
                if self.count % _CHUNK == 0:
                    return fetch
                none = tirx.BufferStore(target, tirx.const(_NOT_LAST, "int32"), [k])
                return [tirx.IfThenElse(start + k < self.count, sequence(fetch), none)]

            def add(k: Any) -> list[tirx.Stmt]:
                to = tirx.BufferLoad(target, [k])

                def take(lane: Any) -> list[tirx.Stmt]:
                    element = tirx.BufferLoad(held, [k * self.width + lane])
                    return [running.add(widen(element, dtype), lane)]

                is_there = start + k < self.count if self.count % _CHUNK else None
                sums = guarded(is_there, unrolled(self.width, "lane", take))
                table = self._add_to_table(to, column, running)
                parts = self._put_part(to - self.rows, column, running)
                puts = tirx.IfThenElse(
                    to >= self.rows, parts,
                    tirx.IfThenElse(to >= 0, sequence(table), None),
                )  # fmt: skip
                ended = [puts, *unrolled(self.width, "lane", lambda lane: [running.clear(lane)])]
                return [*sums, *guarded(tirx.NE(to, _NOT_LAST), ended)]

            chunk = [
                tirx.AllocBuffer(held),
                tirx.AllocBuffer(target),
                *running.start(),
                *unrolled(_CHUNK, "k", load),
                *unrolled(_CHUNK, "k", add),
            ]
            return [
                tirx.Bind(start, tirx.floordiv(block, tiles) * _CHUNK),
                tirx.Bind(column, vector * self.width),
                *guarded(inside, chunk),
            ]

        return launch(self.chunks * tiles, threads, body)

    def _add_to_table(self, row: Any, column: Any, running: ThreadAccumulator) -> list[tirx.Stmt]:
        to = row * self.columns + column
        loads, element = _loaded(self.total, to, self.width)

        def added(lane: Any) -> Any:
            summed = self.table.scaled(running.result(lane))
            taken = tirx.Cast("float64", element(lane)) + summed
            return m.cast(taken, self.total.spec.dtype)

        return [*loads, *_stored(self.total, to, self.width, added)]

    def _put_part(self, row: Any, column: Any, running: ThreadAccumulator) -> tirx.Stmt:
        def put(lane: Any) -> list[tirx.Stmt]:
            return [self.partial.store(row * self.columns + column + lane, running.result(lane))]

        return sequence(unrolled(self.width, "lane", put))

    def _add_parts(self) -> tirx.Stmt:
        """Emit the sums of ids whose items are in several chunks, by the first one's blocks."""
        vectors = self.columns // self.width
        tiles = -(-vectors // WARP)

        def body(block: Any, thread: Any) -> list[tirx.Stmt]:
            names = {n: tirx.Var(n, "int32") for n in ("chunk", "column", "span")}
            chunk, column, span = names.values()
            line, lane = tirx.floordiv(thread, WARP), tirx.floormod(thread, WARP)
            vector = tirx.floormod(block, tiles) * WARP + lane
            # Every thread reaches the barrier of `combine`; nothing is added where `span` is 0.
            inside = tirx.all(span > 0, column < self.columns)
            running = ThreadAccumulator.declare("sum", "float64", self.width)

            def take(row: Any) -> list[tirx.Stmt]:
                def one(at: Any) -> list[tirx.Stmt]:
                    part = self.partial.load(row * self.columns + column + at)
                    return [running.add(part, at)]

                return unrolled(self.width, "at", one)

            step = tirx.Var("step", "int32")
            others = tirx.For(
                step, 0, tirx.floordiv(span - line + TILE_ROWS - 1, TILE_ROWS),
                tirx.ForKind.SERIAL,
                sequence(take(2 * (chunk + 1 + step * TILE_ROWS + line))),
            )  # fmt: skip
            of_first = guarded(tirx.EQ(line, 0), take(2 * chunk + 1))
            # `combine` calls this for each column of a thread; the table takes them together.
            own = self.table.id_of(self.order.load(chunk * _CHUNK + _CHUNK - 1))
            done = self._add_to_table(own, column, running)

            def put(at: Any) -> list[tirx.Stmt]:
                return guarded(tirx.EQ(at, self.width - 1), done)

            return [
                tirx.Bind(chunk, tirx.floordiv(block, tiles)),
                tirx.Bind(column, vector * self.width),
                tirx.Bind(span, self.spans.load(chunk)),
                *running.start(),
                *guarded(inside, [*of_first, others]),
                *TileMemory(line, lane, self.width).combine(running, inside, put),
            ]

        return launch(self.chunks * tiles, WARP * TILE_ROWS, body)


def _one_where(condition: Any) -> Any:
    return tirx.Select(condition, tirx.const(1, "int32"), tirx.const(0, "int32"))
