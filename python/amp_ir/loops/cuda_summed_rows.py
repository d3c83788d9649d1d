# SPDX-License-Identifier: Apache-2.0
"""CUDA launches of a group whose rows are summed both ways: blocks keep sums of the columns."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx import For, ForKind

from amp_ir.loops.cuda_elements import (
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
from amp_ir.loops.cuda_launch import (
    WARP,
    ThreadAccumulator,
    guarded,
    launch,
    loop,
    synchronise,
    unrolled,
)
from amp_ir.loops.cuda_rows import row_body, threads_of_row
from amp_ir.loops.cuda_tiles import combine_parts
from amp_ir.loops.ir import Reduction
from amp_ir.loops.kernel_buffers import FlatBuffer
from amp_ir.loops.levels import Level
from amp_ir.loops.statements import sequence


def summed_rows_launches(elements: GroupElements) -> list[tirx.Stmt]:
    """Each block goes through its rows, then the blocks' sums of the columns are added up."""
    threads = max(WARP, threads_of_row(elements))
    blocks = min(elements.rows, MANY_BLOCKS // 2)
    share = -(-elements.rows // blocks)
    blocks = -(-elements.rows // share)
    steps = -(-elements.chunks // threads)
    extent = elements.chunks * elements.width
    sums = [value for value in elements.group.column if isinstance(value, Reduction)]
    stored = {id(s): elements.make_scratch(blocks * extent, kept_dtype_of(s)) for s in sums}
    in_registers = steps * elements.width <= MAX_RUNNING

    def body(block: Any, thread: Any) -> list[tirx.Stmt]:
        running = {
            id(s): accumulator_of(s, steps * elements.width if in_registers else 1) for s in sums
        }
        statements: list[tirx.Stmt] = []
        if in_registers:
            for one in running.values():
                statements += one.start()
        else:
            statements += _clear(sums, stored, (block, extent), (thread, threads))

        def takes(level: Level, step: Any, chunk: Any) -> list[tuple[Reduction, Take]]:
            if in_registers:
                return [(s, adding(running[id(s)], step * elements.width)) for s in level.columns]
            start = block * extent + chunk * elements.width
            return [(s, adding_to(s, stored[id(s)].buffer, start)) for s in level.columns]

        item = tirx.Var("item", "int32")
        row = tirx.Var("row", "int32")
        inner = [
            tirx.Bind(row, block * share + item),
            *row_body(elements, row, (thread, threads), None, takes),
            # The next row's sums go through the same shared memory.
            synchronise(),
        ]
        count = tirx.const(share, "int32")
        if elements.rows % share:
            count = tirx.min(count, elements.rows - block * share)
        statements.append(For(item, 0, count, ForKind.SERIAL, sequence(inner)))
        if in_registers:
            for s in sums:
                target = (stored[id(s)].buffer, block * extent)
                statements += _put_sums(elements, running[id(s)], target, steps, threads, thread)
        return statements

    def finished(value: Reduction) -> tirx.Stmt:
        buffer = elements.buffers[id(value)]
        return combine_parts(value, stored[id(value)].buffer, blocks, extent, buffer)

    return [launch(blocks, threads, body), *(finished(s) for s in sums)]


def _put_sums(
    elements: GroupElements,
    running: ThreadAccumulator,
    target: tuple[Any, Any],
    steps: int,
    threads: int,
    thread: Any,
) -> list[tirx.Stmt]:
    buffer, start = target

    def put(step: Any) -> list[tirx.Stmt]:
        chunk = step * threads + thread

        def one(lane: Any) -> list[tirx.Stmt]:
            element = tirx.BufferLoad(running.running, [step * elements.width + lane])
            at = start + chunk * elements.width + lane
            return [tirx.BufferStore(buffer, element, [at])]

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
