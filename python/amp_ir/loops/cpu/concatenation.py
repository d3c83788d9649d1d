# SPDX-License-Identifier: Apache-2.0
"""CPU kernel of a concatenation: copies each tensor to its position in the result.

Loops over the elements of the result would test for each element which tensor it comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from tvm import tirx
from tvm.tirx import For, ForKind

from amp_ir.ir.tensor_layout import dtype_nbytes
from amp_ir.ir.vector_instructions import LANES
from amp_ir.loops.codegen.kernel_buffers import FlatBuffer
from amp_ir.loops.codegen.statements import sequence
from amp_ir.loops.group import Group, storage_of
from amp_ir.loops.ir import Pointwise

# Elements that a task copies at least, and at most: balanced, and worth a launch.
LEAST, MOST = 8192, 65536
# Elements in a row of each tensor from which on it is copied as a whole; and tensors from which on
# that is better whatever their size.
LONG, MANY = 2 * LANES, 8


@attrs.frozen
class _Piece:
    """`count` elements of a tensor from `start` on, and their position in the result."""

    source: FlatBuffer
    start: int
    count: int
    to: int


def parts_of(group: Group, buffers: dict[int, FlatBuffer]) -> list[FlatBuffer] | None:
    """Return the inputs that a group concatenates, if it does nothing else and copying pays off."""
    value = group.stored[0] if group.stored else None
    if not isinstance(value, Pointwise) or not value.parts or group.members != [value]:
        return None
    found = [buffers.get(id(storage_of(part))) for part in value.parts]
    known = [one for one in found if one is not None and one.spec.dtype == value.dtype]
    if len(known) < len(found):
        return None
    is_long = all(one.spec.size >= value.part_rows * LONG for one in known)
    return known if is_long or (value.part_rows == 1 and len(known) >= MANY) else None


def concatenated(parts: Sequence[FlatBuffer], out: FlatBuffer, rows: int) -> tirx.Stmt:
    """Copy a row of each of `parts` in turn to `out`, which is as large as all of them."""
    if rows > 1:
        return _rows(parts, out, rows)
    tasks = _tasks(parts)
    task = tirx.Var("task", "int32")
    body: tirx.Stmt | None = None
    for k in reversed(range(len(tasks))):
        copies = sequence([_copy(p.source, p.start, out, p.to, p.count) for p in tasks[k]])
        is_this = task <= tirx.const(k, "int32")
        body = copies if body is None else tirx.IfThenElse(is_this, copies, body)
    assert body is not None
    return _loop(task, len(tasks), body, is_parallel=len(tasks) > 1)


def _rows(parts: Sequence[FlatBuffer], out: FlatBuffer, rows: int) -> tirx.Stmt:
    row = tirx.Var("row", "int32")
    width = out.spec.size // rows
    copies, column = [], 0
    for part in parts:
        count = part.spec.size // rows
        copies.append(_copy(part, row * count, out, row * width + column, count))
        column += count
    return _loop(row, rows, sequence(copies), is_parallel=out.spec.size > LEAST)


def _tasks(parts: Sequence[FlatBuffer]) -> list[list[_Piece]]:
    tasks: list[list[_Piece]] = [[]]
    to = held = 0
    for part in parts:
        for start in range(0, part.spec.size, MOST):
            count = min(MOST, part.spec.size - start)
            if held >= LEAST:
                tasks.append([])
                held = 0
            tasks[-1].append(_Piece(part, start, count, to))
            held += count
            to += count
    return tasks


def _copy(source: FlatBuffer, start: Any, out: FlatBuffer, to: Any, count: int) -> tirx.Stmt:
    """Copy bits unchanged: nothing is widened, and NaN payloads stay.

    A call, since LLVM emits a loop for every copy and takes seconds for several hundred.
    """
    target = tirx.address_of(tirx.BufferLoad(out.buffer, [to]))
    data = tirx.address_of(tirx.BufferLoad(source.buffer, [start]))
    nbytes = tirx.const(count * dtype_nbytes(out.spec.dtype), "uint64")
    return tirx.Evaluate(tirx.call_extern("handle", "memcpy", target, data, nbytes))


def _loop(variable: tirx.Var, extent: int, body: tirx.Stmt, *, is_parallel: bool) -> tirx.Stmt:
    return For(variable, 0, extent, ForKind.PARALLEL if is_parallel else ForKind.SERIAL, body)
