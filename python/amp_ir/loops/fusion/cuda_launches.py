# SPDX-License-Identifier: Apache-2.0
"""Horizontal fusion on a GPU: one launch over the blocks of many kernels.

A block finds its group and its call by bisection, which costs a few uniform branches; every thread
would have to fill a table of addresses.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.tirx import AttrStmt

from amp_ir.loops.codegen.statements import sequence
from amp_ir.loops.cuda import launch as cuda_launch
from amp_ir.loops.cuda.launch import THREADS, local_buffer
from amp_ir.loops.fusion.horizontal_groups import Body, HorizontalGroup, like

# A launch takes 4096 bytes of parameters, an address each.
MOST_PARAMETERS = 400


def most_parameters() -> int:
    """Return how many parameters a fused function may have."""
    return MOST_PARAMETERS


def body_of(function: tirx.PrimFunc) -> Body | None:
    """Return the blocks of a function's one launch; None if several, or of another block size."""
    blocks = function.body
    if not isinstance(blocks, AttrStmt) or int(blocks.body.value) != THREADS:
        return None
    threads = blocks.body
    return Body(
        list(function.params), blocks.node.var, int(blocks.value), threads.body, threads.node.var
    )


def launch(groups: list[HorizontalGroup]) -> tirx.Stmt:
    """Emit one launch over the blocks of all groups."""
    total = sum(group.iterations for group in groups)

    def body(block: Any, thread: Any) -> list[tirx.Stmt]:
        parts: list[tuple[int, tirx.Stmt]] = []
        start = 0
        for group in groups:
            parts.append((start, _blocks_of(group, block, start, thread)))
            start += group.iterations
        return [_choose(block, parts)]

    return cuda_launch.launch(total, THREADS, body)


def _blocks_of(group: HorizontalGroup, block: Any, start: int, thread: Any) -> tirx.Stmt:
    """Emit the work of a block of a group whose first block is `start`."""
    body = group.body
    extent = tirx.const(body.extent, "int32")
    own, which = tirx.Var("own", "int32"), tirx.Var("which", "int32")
    statements: list[tirx.Stmt] = [
        tirx.Bind(own, block - tirx.const(start, "int32")),
        tirx.Bind(which, tirx.floordiv(own, extent)),
    ]
    assert body.index is not None and body.thread is not None
    replaced: dict[tirx.Var, Any] = {body.thread: thread}
    for k, parameter in enumerate(body.parameters):
        choices = [parameters[k] for parameters in group.parameters]
        replaced[parameter] = choices[0]
        if any(one is not choices[0] for one in choices):
            replaced[parameter] = like(parameter, parameter.name)
            statements += _chosen(replaced[parameter], choices, which)
    statements += [
        tirx.Bind(body.index, tirx.floormod(own, extent)),
        tvm_ffi.structural_map(body.statement, (tirx.Var, lambda one: replaced.get(one, one))),
    ]
    return sequence(statements)


def _chosen(buffer: tirx.Var, choices: list[tirx.Var], which: Any) -> list[tirx.Stmt]:
    """Let `buffer` be element `which` of `choices`."""
    held = local_buffer(1, "uint64", "held")
    stores = [
        (k, tirx.BufferStore(held, tirx.reinterpret("uint64", one.data), [0]))
        for k, one in enumerate(choices)
    ]
    pointer = choices[0].data.ty
    address = tirx.Var(f"{buffer.name}_at", pointer)
    return [
        tirx.AllocBuffer(held),
        _choose(which, stores),
        tirx.Bind(address, tirx.reinterpret(pointer, tirx.BufferLoad(held, [0]))),
        tirx.DeclBuffer(buffer, data=address),
    ]


def _choose(index: Any, parts: list[tuple[int, tirx.Stmt]]) -> tirx.Stmt:
    """Select by bisection the statement with the last start that is not above `index`."""
    if len(parts) == 1:
        return parts[0][1]
    middle = len(parts) // 2
    is_before = index < tirx.const(parts[middle][0], "int32")
    return tirx.IfThenElse(
        is_before, _choose(index, parts[:middle]), _choose(index, parts[middle:])
    )
