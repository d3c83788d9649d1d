# SPDX-License-Identifier: Apache-2.0
"""Many kernels as one on a GPU: a launch over the blocks of all.

A block finds its family and its call by halving, which costs a few branches that all its threads
take alike; a table of addresses would be filled by every thread.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.tirx import AttrStmt

from amp_ir.loops.codegen.statements import sequence
from amp_ir.loops.cuda import launch as cuda_launch
from amp_ir.loops.cuda.launch import THREADS, local_buffer
from amp_ir.loops.fusion.families import Body, Family, like

# A launch takes 4096 bytes of parameters, an address each.
MOST_PARAMETERS = 400


def most_parameters() -> int:
    """How many parameters a merged function may have."""
    return MOST_PARAMETERS


def body_of(function: tirx.PrimFunc) -> Body | None:
    """The blocks of a function's one launch; None if it has several, or blocks of another size."""
    blocks = function.body
    if not isinstance(blocks, AttrStmt) or int(blocks.body.value) != THREADS:
        return None
    threads = blocks.body
    return Body(
        list(function.params), blocks.node.var, int(blocks.value), threads.body, threads.node.var
    )


def launch(families: list[Family]) -> tirx.Stmt:
    """One launch over the blocks of all families."""
    total = sum(family.iterations for family in families)

    def body(block: Any, thread: Any) -> list[tirx.Stmt]:
        parts: list[tuple[int, tirx.Stmt]] = []
        start = 0
        for family in families:
            parts.append((start, _blocks_of(family, block, start, thread)))
            start += family.iterations
        return [_choose(block, parts)]

    return cuda_launch.launch(total, THREADS, body)


def _blocks_of(family: Family, block: Any, start: int, thread: Any) -> tirx.Stmt:
    """What a block does that belongs to a family, whose first block is `start`."""
    body = family.body
    extent = tirx.const(body.extent, "int32")
    own, which = tirx.Var("own", "int32"), tirx.Var("which", "int32")
    statements: list[tirx.Stmt] = [
        tirx.Bind(own, block - tirx.const(start, "int32")),
        tirx.Bind(which, tirx.floordiv(own, extent)),
    ]
    assert body.index is not None and body.thread is not None
    replaced: dict[tirx.Var, Any] = {body.thread: thread}
    for k, parameter in enumerate(body.parameters):
        choices = [parameters[k] for parameters in family.parameters]
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
    """Let `buffer` be the one of `choices` with number `which`."""
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
    """The statement with the last start that is not above `index`, found by halving."""
    if len(parts) == 1:
        return parts[0][1]
    middle = len(parts) // 2
    is_before = index < tirx.const(parts[middle][0], "int32")
    return tirx.IfThenElse(
        is_before, _choose(index, parts[:middle]), _choose(index, parts[middle:])
    )
