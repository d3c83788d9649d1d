# SPDX-License-Identifier: Apache-2.0
"""CUDA launches of a group that reduces both rows and columns: blocks have sums of the columns."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from amp_ir.ir.tensor_layout import dtype_nbytes
from amp_ir.loops.codegen.accumulate_blocks import COLUMN_BLOCK, Loop
from amp_ir.loops.codegen.kernel_buffers import FlatBuffer
from amp_ir.loops.codegen.levels import Level
from amp_ir.loops.codegen.statements import sequence
from amp_ir.loops.cuda.group_elements import (
    MANY_BLOCKS,
    MAX_RUNNING,
    SHARED_NBYTES,
    GroupElements,
    Take,
    accumulator_in,
    accumulator_of,
    adding,
    adding_to,
    kept_dtype_of,
)
from amp_ir.loops.cuda.launch import (
    THREADS,
    WARP,
    ThreadAccumulator,
    guarded,
    kept_dtype,
    launch,
    loop,
    synchronise,
    unrolled,
)
from amp_ir.loops.cuda.rows import row_body, threads_of_row
from amp_ir.loops.cuda.tiles import combine_parts
from amp_ir.loops.ir import Reduction

# Warps of a block that each have a row, and its sums of the columns in registers.
WARPS = 4
# Such blocks: all run at once on the largest GPUs.
BLOCKS = MANY_BLOCKS
# Running values of all sums together that a thread holds beside its row.
_MAX_HELD = 96


def summed_rows_launches(elements: GroupElements) -> list[tirx.Stmt]:
    """Emit the rows of each block, then the sum of the blocks' sums of the columns."""
    sums = [value for value in elements.group.column if isinstance(value, Reduction)]
    if _fits_warps(elements, sums):
        return _launches_of_warps(elements, sums)
    return _launches_of_blocks(elements, sums)


def _fits_warps(elements: GroupElements, sums: list[Reduction]) -> bool:
    """Return whether a warp holds its sums of all columns, and a block's fit shared memory."""
    running = -(-elements.chunks // WARP) * elements.width
    dtypes = {kept_dtype_of(value) for value in sums}
    shared = sum(dtype_nbytes(one) for one in dtypes) * WARPS * elements.chunks * elements.width
    is_held = running <= MAX_RUNNING and running * len(sums) <= _MAX_HELD
    return is_held and shared <= SHARED_NBYTES


def _launches_of_warps(elements: GroupElements, sums: list[Reduction]) -> list[tirx.Stmt]:
    """Emit rows that a warp has each: no thread waits for another warp until the end."""
    steps = -(-elements.chunks // WARP)
    extent = elements.chunks * elements.width
    # A running value takes no more rows than a block of a long sum.
    share = min(COLUMN_BLOCK, -(-elements.rows // (BLOCKS * WARPS)))
    blocks = -(-elements.rows // (share * WARPS))
    stored = {id(s): elements.make_workspace(blocks * extent, kept_dtype_of(s)) for s in sums}

    def body(block: Any, thread: Any) -> list[tirx.Stmt]:
        warp, lane = tirx.floordiv(thread, WARP), tirx.floormod(thread, WARP)
        running = {id(s): accumulator_of(s, steps * elements.width) for s in sums}

        def takes(level: Level, step: Any, _chunk: Any) -> list[tuple[Reduction, Take]]:
            return [(s, adding(running[id(s)], step * elements.width)) for s in level.columns]

        item, row = tirx.Var("item", "int32"), tirx.Var("row", "int32")
        at: Any = (block * share + item) * WARPS + warp
        inside = None
        if elements.rows % (share * WARPS):
            # Lanes without a row take part in shuffles, and look at the last one.
            inside = at < elements.rows
            at = tirx.min(at, elements.rows - 1)
        one = [tirx.Bind(row, at), *row_body(elements, row, (lane, WARP), inside, takes)]
        starts = [statement for one in running.values() for statement in one.start()]
        rows = tirx.For(item, 0, share, tirx.ForKind.SERIAL, sequence(one))
        statements = [*starts, rows]
        shared: dict[str, tirx.Var] = {}
        for s in sums:
            target = (accumulator_in(s, stored[id(s)].buffer), block * extent)
            statements += _over_warps(elements, s, running[id(s)], shared, target, thread)
        return statements

    combined = [(s, stored[id(s)].buffer, elements.buffers[id(s)]) for s in sums]
    return [launch(blocks, WARPS * WARP, body), combine_parts(combined, blocks, extent)]


def _over_warps(
    elements: GroupElements,
    value: Reduction,
    running: ThreadAccumulator,
    shared: dict[str, tirx.Var],
    target: tuple[ThreadAccumulator, Any],
    thread: Any,
) -> list[tirx.Stmt]:
    """Add up the warps' sums of the columns, in order, and store the block's.

    `shared`: shared memory by dtype, which all sums of a dtype go through one after the other.
    """
    dtype, threads = kept_dtype(running.dtype), WARPS * WARP
    extent = elements.chunks * elements.width
    warp, lane = tirx.floordiv(thread, WARP), tirx.floormod(thread, WARP)
    stored, start = target
    statements: list[tirx.Stmt] = []
    if dtype in shared:
        statements.append(synchronise())
    else:
        shared[dtype] = tirx.decl_buffer((WARPS * extent,), dtype, "warps", scope="shared")
        statements.append(tirx.AllocBuffer(shared[dtype]))
    memory = shared[dtype]

    def write(step: Any) -> list[tirx.Stmt]:
        chunk = step * WARP + lane

        def one(at: Any) -> list[tirx.Stmt]:
            element = tirx.BufferLoad(running.running, [step * elements.width + at])
            place = warp * extent + chunk * elements.width + at
            return [tirx.BufferStore(memory, element, [place])]

        inside = chunk < elements.chunks if elements.chunks % WARP else None
        return guarded(inside, unrolled(elements.width, "at", one))

    def add(step: Any) -> list[tirx.Stmt]:
        column = tirx.Var("column", "int32")
        total = accumulator_of(value)

        def take(k: Any) -> list[tirx.Stmt]:
            element = tirx.BufferLoad(memory, [k * extent + column])
            return [total.add(total.taken(element))]

        put = [
            *total.start(),
            *unrolled(WARPS, "warp", take),
            stored.put(total.result(), start + column),
        ]
        inside = column < extent if extent % threads else None
        return [tirx.Bind(column, step * threads + thread), *guarded(inside, put)]

    return [
        *statements,
        *unrolled(-(-elements.chunks // WARP), "step", write),
        synchronise(),
        *loop(-(-extent // threads), "step", add),
    ]


def _launches_of_blocks(elements: GroupElements, sums: list[Reduction]) -> list[tirx.Stmt]:
    """Emit rows that a block has each."""
    threads = max(WARP, threads_of_row(elements))
    # As many threads on a multiprocessor, however few have a row.
    blocks = min(elements.rows, MANY_BLOCKS // 2 * max(1, THREADS // threads))
    share = -(-elements.rows // blocks)
    blocks = -(-elements.rows // share)
    steps = -(-elements.chunks // threads)
    extent = elements.chunks * elements.width
    is_long = share > COLUMN_BLOCK
    stored = {
        id(s): elements.make_workspace(blocks * extent, kept_dtype_of(s, is_long=is_long))
        for s in sums
    }
    in_registers = steps * elements.width <= MAX_RUNNING

    def body(block: Any, thread: Any) -> list[tirx.Stmt]:
        running = {
            id(s): accumulator_of(s, steps * elements.width if in_registers else 1) for s in sums
        }
        statements: list[tirx.Stmt] = []
        if in_registers:
            for one in running.values():
                statements += one.start()
        if is_long or not in_registers:
            statements += _clear(sums, stored, (block, extent), (thread, threads))

        def takes(level: Level, step: Any, chunk: Any) -> list[tuple[Reduction, Take]]:
            if in_registers:
                return [(s, adding(running[id(s)], step * elements.width)) for s in level.columns]
            start = block * extent + chunk * elements.width
            return [(s, adding_to(s, stored[id(s)].buffer, start)) for s in level.columns]

        def put_sums() -> list[tirx.Stmt]:
            puts: list[tirx.Stmt] = []
            for s in sums if in_registers else ():
                target = (accumulator_in(s, stored[id(s)].buffer), block * extent)
                puts += _put_sums(
                    elements, running[id(s)], target, steps, threads, thread, adds=is_long
                )
            return puts

        item = Loop("item", share, _rows_of(elements, block, share))
        item = item.cut(COLUMN_BLOCK) if is_long else item
        row = tirx.Var("row", "int32")
        inner = [
            tirx.Bind(row, block * share + item.at),
            *row_body(elements, row, (thread, threads), None, takes),
            # The next row's sums go through the same shared memory.
            synchronise(),
        ]
        statements.append(item.around(inner, put_sums() if is_long else ()))
        return statements if is_long else [*statements, *put_sums()]

    combined = [(s, stored[id(s)].buffer, elements.buffers[id(s)]) for s in sums]
    return [launch(blocks, threads, body), combine_parts(combined, blocks, extent)]


def _rows_of(elements: GroupElements, block: Any, share: int) -> Any:
    """Return how many rows a block has; None: as many as it can have."""
    if elements.rows % share == 0:
        return None
    return tirx.min(tirx.const(share, "int32"), elements.rows - block * share)


def _put_sums(
    elements: GroupElements,
    running: ThreadAccumulator,
    target: tuple[ThreadAccumulator, Any],
    steps: int,
    threads: int,
    thread: Any,
    *,
    adds: bool,
) -> list[tirx.Stmt]:
    """Store a thread's sums from `start` on, or add them there and restart."""
    stored, start = target

    def put(step: Any) -> list[tirx.Stmt]:
        chunk = step * threads + thread

        def one(lane: Any) -> list[tirx.Stmt]:
            own = step * elements.width + lane
            element, at = running.result(own), start + chunk * elements.width + lane
            if not adds:
                return [stored.put(element, at)]
            return [stored.add(element, at), running.clear(own)]

        inside = chunk < elements.chunks if elements.chunks % threads else None
        return guarded(inside, unrolled(elements.width, "lane", one))

    return unrolled(steps, "step", put)


def _clear(
    sums: list[Reduction], stored: dict[int, FlatBuffer], place: tuple[Any, int],
    share: tuple[Any, int],
) -> list[tirx.Stmt]:  # fmt: skip
    """Set a block's sums in memory to the neutral element, and wait for all of them."""
    block, extent = place
    thread, threads = share
    statements: list[tirx.Stmt] = []
    for value in sums:
        helper = accumulator_in(value, stored[id(value)].buffer)

        def visit(step: Any, helper: ThreadAccumulator = helper) -> list[tirx.Stmt]:
            at = step * threads + thread
            inside = at < extent if extent % threads else None
            return guarded(inside, [helper.clear(block * extent + at)])

        statements += loop(-(-extent // threads), "step", visit)
    return [*statements, synchronise()]
