# SPDX-License-Identifier: Apache-2.0
"""Sorting rows on a GPU: one thread per element counts the elements that precede its own.

That count is the element's position in the order. A merge sort does fewer comparisons, n log n per
row instead of n^2, but one thread would do them all, in memory of its own: for 8732 elements (the
anchors of an SSD300) 1.2e5 steps of several dependent loads, where here each thread takes 8732
short ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.tirx import For, ForKind

from amp_ir.loops import math as m
from amp_ir.loops.codegen.statements import sequence
from amp_ir.loops.cuda.launch import THREADS, WARP, guarded, launch, local_buffer, synchronise


def rank_launch(
    rows: int,
    length: int,
    key: Callable[[Any, Any], Any],
    precedes: Callable[[Any, Any], Any],
    put: Callable[[Any, Any, Any], list[tirx.Stmt]],
) -> tirx.Stmt:
    """Call `put(row, item, rank)` once for each item of each of `rows` rows of `length` items.

    Equal items keep their order, so that ranks are a permutation: each position is written once.

    Args:
        rows: the number of rows.
        length: the items of a row.
        key: the sort key of an item of a row: `key(row, item)`.
        precedes: whether one key comes strictly before another.
        put: the statements for an item; `rank` is its position, int32.
    """
    threads = min(THREADS, -(-length // WARP) * WARP)
    parts = -(-length // threads)

    def body(block: Any, thread: Any) -> list[tirx.Stmt]:
        row = tirx.floordiv(block, parts) if parts > 1 else block
        item = tirx.floormod(block, parts) * threads + thread if parts > 1 else thread
        own = key(row, m.clamp(item, length))
        mine = tirx.Var("mine", m.dtype_of(own))
        rank = local_buffer(1, "int32", "rank")
        found = tirx.BufferLoad(rank, [0])
        is_item = None if length % threads == 0 else item < length
        return [
            tirx.Bind(mine, own),
            tirx.AllocBuffer(rank),
            tirx.BufferStore(rank, tirx.const(0, "int32"), [0]),
            *_count(length, threads, thread, row, item, mine, rank, key, precedes),
            *guarded(is_item, put(row, item, found)),
        ]

    return launch(rows * parts, threads, body)


def _count(
    length: int,
    threads: int,
    thread: Any,
    row: Any,
    item: Any,
    mine: tirx.Var,
    rank: tirx.Var,
    key: Callable[[Any, Any], Any],
    precedes: Callable[[Any, Any], Any],
) -> list[tirx.Stmt]:
    """Count in `rank` the items before `mine`; the row passes through shared memory in tiles."""
    seen = tirx.decl_buffer((threads,), m.dtype_of(mine), "seen", scope="shared")
    tile, at = tirx.Var("tile", "int32"), tirx.Var("at", "int32")
    start = tile * threads
    other = tirx.BufferLoad(seen, [at])
    one, zero = tirx.const(1, "int32"), tirx.const(0, "int32")
    # Not by negation: TVM takes the contrary of `a < b` for `b <= a`, which is false for NaN too.
    of_tie = tirx.Select(start + at < item, one, zero)
    counted = tirx.Select(
        precedes(other, mine), one, tirx.Select(precedes(mine, other), zero, of_tie)
    )
    step = tirx.BufferStore(rank, tirx.BufferLoad(rank, [0]) + counted, [0])
    extent = threads if length % threads == 0 else tirx.min(threads, length - start)
    compare = For(at, 0, extent, ForKind.SERIAL, step)
    shown = tirx.BufferStore(seen, key(row, m.clamp(start + thread, length)), [thread])
    # Nobody may still read the tile before.
    passes = sequence([synchronise(), shown, synchronise(), compare])
    return [tirx.AllocBuffer(seen), For(tile, 0, -(-length // threads), ForKind.SERIAL, passes)]
