# SPDX-License-Identifier: Apache-2.0
"""Horizontal fusion on a CPU: one parallel loop over the tasks of many kernels."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.tirx import For, ForKind

from amp_ir.loops.codegen.statements import sequence
from amp_ir.loops.fusion.horizontal_groups import Body, HorizontalGroup, like

# Rough number of elements of a task: a launch divides tasks by number, so they should take the
# same time.
TASK_ELEMENTS = 65536
# TVM and LLVM take time that grows faster than the number of a function's parameters.
MOST_PARAMETERS = 128


def most_parameters() -> int:
    """Return how many parameters a fused function may have."""
    return MOST_PARAMETERS


def body_of(function: tirx.PrimFunc) -> Body | None:
    """Return the function as independent iterations; None if it has several parallel loops."""
    body = function.body
    parameters = list(function.params)
    if isinstance(body, For) and body.kind == ForKind.PARALLEL:
        return Body(parameters, body.loop_var, int(body.extent), body.body)
    loops: list[For] = []
    tvm_ffi.structural_walk(body, (For, loops.append))
    if any(loop.kind == ForKind.PARALLEL for loop in loops):
        return None
    return Body(parameters, None, 1, body)


def launch(groups: list[HorizontalGroup]) -> tirx.Stmt:
    """Emit one parallel loop over the tasks of all groups, after filling their address tables."""
    task = tirx.Var("task", "int32")
    body: tirx.Stmt | None = None
    total = end = sum(_tasks(group) for group in groups)
    tables: list[tirx.Stmt] = []
    for group in reversed(groups):
        start = end - _tasks(group)
        statement = _task(group, task - tirx.const(start, "int32"), tables)
        body = (
            statement
            if body is None
            else tirx.IfThenElse(task < tirx.const(end, "int32"), statement, body)
        )
        end = start
    assert body is not None
    elements = sum(group.iterations * group.body.elements for group in groups)
    is_parallel = total > 1 and elements > TASK_ELEMENTS
    loop = For(task, 0, total, ForKind.PARALLEL if is_parallel else ForKind.SERIAL, body)
    return sequence([*tables, loop])


def _task(group: HorizontalGroup, number: Any, tables: list[tirx.Stmt]) -> tirx.Stmt:
    """Emit one task of a group: some iterations, each on the tensors of its call."""
    step = tirx.Var("step", "int32")
    iteration = number * tirx.const(_per_task(group), "int32") + step
    extent = tirx.const(group.body.extent, "int32")
    which = tirx.Var("which", "int32")
    statements: list[tirx.Stmt] = [tirx.Bind(which, tirx.floordiv(iteration, extent))]
    replaced: dict[tirx.Var, tirx.Var] = {}
    for k, own in enumerate(group.body.parameters):
        choices = [parameters[k] for parameters in group.parameters]
        replaced[own] = choices[0]
        if any(one is not choices[0] for one in choices):
            address = tirx.Var(f"{own.name}_at", choices[0].data.ty)
            table = _address_table(choices, tables)
            chosen = tirx.reinterpret(choices[0].data.ty, tirx.BufferLoad(table, [which]))
            replaced[own] = like(own, own.name)
            statements.append(tirx.Bind(address, chosen))
            statements.append(tirx.DeclBuffer(replaced[own], data=address))
    if group.body.index is not None:
        statements.append(tirx.Bind(group.body.index, tirx.floormod(iteration, extent)))
    statements.append(
        tvm_ffi.structural_map(group.body.statement, (tirx.Var, lambda one: replaced.get(one, one)))
    )
    body = sequence(statements)
    if group.iterations % _per_task(group):
        is_there = iteration < tirx.const(group.iterations, "int32")
        body = tirx.IfThenElse(is_there, body, None)
    return For(step, 0, _per_task(group), ForKind.SERIAL, body)


def _address_table(buffers: list[tirx.Var], statements: list[tirx.Stmt]) -> tirx.Var:
    """Declare a local table of buffer addresses, as integers: TIR has no tables of pointers."""
    table = tirx.decl_buffer((len(buffers),), "uint64", "addresses")
    statements.append(tirx.AllocBuffer(table))
    for k, buffer in enumerate(buffers):
        address = tirx.reinterpret("uint64", buffer.data)
        statements.append(tirx.BufferStore(table, address, [tirx.const(k, "int32")]))
    return table


def _per_task(group: HorizontalGroup) -> int:
    return min(max(1, TASK_ELEMENTS // group.body.elements), group.iterations)


def _tasks(group: HorizontalGroup) -> int:
    return -(-group.iterations // _per_task(group))
