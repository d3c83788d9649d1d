# SPDX-License-Identifier: Apache-2.0
"""Loops as the virtual machine runs them: one call of a native function with a body's program.

Only this file and src/kernels/step/loop.cc know the order of the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import tvm
from tvm import relax

from amp_ir.dialect.loop import CARRIED, ENTRY, WHOLE, loop_of
from amp_ir.ir.dataflow import DPS_CALL, op_name
from amp_ir.ir.library_call import library_call, shape_argument
from amp_ir.ir.tensor_layout import dtype_nbytes

SYMBOL = "amp_ir.loop.run"
LIBRARY = "a loop of own kernels and library calls"
# What the native function reads an entry at, and kernels rely on.
_ALIGNMENT_BYTES = 64
_WORKSPACE, _PERSISTENT = 4, 5


def write_loop_call(
    call: relax.Call,
    body: str,
    packed: Sequence[relax.Expr],
    *,
    arena_bytes: int,
    persistent_nbytes: int,
) -> relax.Call:
    """Return the planned form of a loop: destinations for its results follow.

    Before:  y, h = amp_ir.loop(h0, x, ...)
    After:   y, h = call_dps_packed("amp_ir.loop.run", ("loop0", numbers, h0, x))

    `body` is the program's name. It takes `packed` behind the loop's operands, and an arena of
    `arena_bytes`; its library calls keep `persistent_nbytes` allocated.
    """
    loop = loop_of(call)
    at = _aligned(arena_bytes)
    parameters = [
        (one.ty, place) for one, place in zip(_parameters(call), loop.inputs, strict=True)
    ]
    parameters += [(one.ty, (WHOLE, 0, 0)) for one in packed]
    results = list(zip(loop.body["main"].body.ty.fields, loop.outputs, strict=True))
    operands: list[int] = []
    for k, (type_, (kind, first, stride)) in enumerate([*parameters, *results]):
        size = math.prod(shape_of_type(type_))
        nbytes = size * dtype_nbytes(str(type_.dtype))
        is_result = k >= len(parameters)
        scratch = -1
        takes_turns = is_result and kind == CARRIED
        # A carried input may be an entry of a result, which is as unaligned as that.
        is_entry = kind == ENTRY or (
            kind == CARRIED and not is_result and results[first][1][0] == ENTRY
        )
        if takes_turns or (is_entry and nbytes % _ALIGNMENT_BYTES):
            scratch, at = at, at + _aligned(nbytes)
        operands += [kind, first, stride, size, scratch]
    head = [loop.length, len(parameters), len(results), arena_bytes, max(at, 1), persistent_nbytes]
    arguments = [tvm.ir.StringImm(body), shape_argument([*head, *operands]), *call.args, *packed]
    new = library_call(SYMBOL, arguments, call.ty, call.span)
    notes = tvm.ir.make_node("ir.DictAttrs", ops=op_name(call))
    made = relax.Call(new.op, new.args, notes, new.ty_args, new.span)
    relax.expr._update_type(made, call.ty)
    return made


def shape_of_type(type_: relax.TensorType) -> tuple[int, ...]:
    """Return the extents of a type."""
    return tuple(int(extent) for extent in type_.shape)


def _parameters(call: relax.Call) -> list[relax.Var]:
    return list(loop_of(call).body["main"].params)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def is_loop_call(call: relax.Call) -> bool:
    """Return whether a call is the planned form of a loop."""
    return op_name(call) == DPS_CALL and str(call.args[0].global_symbol) == SYMBOL


def loop_workspace_nbytes(call: relax.Call) -> int:
    """Return the bytes of workspace that a planned loop takes from the caller."""
    return _number(call, _WORKSPACE)


def loop_persistent_nbytes(call: relax.Call) -> int:
    """Return the bytes that the library calls of a planned loop's body keep allocated."""
    return _number(call, _PERSISTENT)


def _number(call: relax.Call, position: int) -> int:
    return int(call.args[1].fields[1].values[position])


@attrs.frozen(eq=False)
class PlannedLoop:
    """A loop of a planned step: its body as a module, and the number of its steps.

    `arguments` are those of the native function after the body: workspace, numbers, tensors.
    """

    body: tvm.IRModule
    length: int
    name: str
    arguments: tuple[relax.Expr, ...]


def planned_loop(ir: tvm.IRModule, call: relax.Call) -> PlannedLoop | None:
    """Return the loop that a call of a planned step runs; None for any other call."""
    if op_name(call) != "relax.call_builtin_with_ctx":
        return None
    variable, *arguments = call.args[1].fields
    kernels = {one: kernel for one, kernel in ir.functions.items() if one.name_hint != "main"}
    body = tvm.IRModule({**kernels, tvm.ir.GlobalVar("main"): ir[variable]})
    length = int(arguments[1].values[0])
    return PlannedLoop(body, length, str(variable.name_hint), tuple(arguments))
