# SPDX-License-Identifier: Apache-2.0
"""CUDA launches of a group that reduces both rows and columns: blocks have sums of the columns."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from amp_ir.loops.codegen.accumulate_blocks import COLUMN_BLOCK, Loop
from amp_ir.loops.codegen.kernel_buffers import FlatBuffer
from amp_ir.loops.codegen.levels import Level
from amp_ir.loops.cuda.group_elements import (
    MANY_BLOCKS,
    MAX_RUNNING,
    GroupElements,
    Take,
    accumulator_in,
    accumulator_of,
    adding,
    adding_to,
    kept_dtype_of,
)
from amp_ir.loops.cuda.launch import (
    WARP,
    ThreadAccumulator,
    guarded,
    launch,
    loop,
    synchronise,
    unrolled,
)
from amp_ir.loops.cuda.rows import row_body, threads_of_row
from amp_ir.loops.cuda.tiles import combine_parts
from amp_ir.loops.ir import Reduction


def summed_rows_launches(elements: GroupElements) -> list[tirx.Stmt]:
    """Emit the rows of each block, then the sum of the blocks' sums of the columns."""
    threads = max(WARP, threads_of_row(elements))
    blocks = min(elements.rows, MANY_BLOCKS // 2)
    share = -(-elements.rows // blocks)
    blocks = -(-elements.rows // share)
    steps = -(-elements.chunks // threads)
    extent = elements.chunks * elements.width
    sums = [value for value in elements.group.column if isinstance(value, Reduction)]
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

    partial = [(s, stored[id(s)].buffer, elements.buffers[id(s)]) for s in sums]
    return [launch(blocks, threads, body), combine_parts(partial, blocks, extent)]


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
