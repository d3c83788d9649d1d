# SPDX-License-Identifier: Apache-2.0
"""CPU emitter: one kernel per group, parallel over rows, vectorised along columns.

Sums run in `LANES` partial sums, in blocks, that are added in a fixed order: so results do not
depend on the number of threads. See group_loops.py and accumulate_blocks.py.
"""

from __future__ import annotations

import math

from tvm import tirx
from tvm.tirx import For, ForKind

from amp_ir.ir.row_loops import ROW
from amp_ir.ir.target import cpu
from amp_ir.loops.codegen.kernel import GroupBuffers, Kernel, OpaqueBuffers, unflatten_axes
from amp_ir.loops.codegen.loop_domain import loop_domain
from amp_ir.loops.codegen.statements import sequence, statements_of
from amp_ir.loops.cpu.columns import columns_kernel, with_few_rows
from amp_ir.loops.cpu.concatenation import concatenated, parts_of
from amp_ir.loops.cpu.group_loops import GRAIN, GroupLoops
from amp_ir.loops.cpu.instructions import functions_of
from amp_ir.loops.cpu.part_loops import parts_kernel, split_concatenation
from amp_ir.loops.cpu.single_row import single_row_kernel
from amp_ir.loops.cpu.summed_rows import summed_rows_kernel
from amp_ir.loops.elements import written_for
from amp_ir.loops.group import Group
from amp_ir.loops.ir import Opaque, Pointwise


def emit_group(group: Group, *, strict: bool = False) -> Kernel:
    """Emit the kernel of a group."""
    buffers = GroupBuffers.declare(group)
    parts = parts_of(group, buffers.by_value)
    if parts is not None:
        value = group.stored[0]
        assert isinstance(value, Pointwise)
        out = buffers.by_value[id(value)]
        return buffers.finish(concatenated(parts, out, value.part_rows))
    split = split_concatenation(group)
    if split is not None:
        with written_for(functions_of(cpu())):
            return buffers.finish(parts_kernel(group, buffers.by_value, split, strict=strict))
    group = with_few_rows(group) or group
    domain = loop_domain(group)
    loops = GroupLoops(group, buffers.by_value, domain, strict)
    with written_for(functions_of(cpu())):
        body = columns_kernel(loops) if domain.keeps_innermost else _rows_kernel(loops)
    return buffers.finish(body)


def _rows_kernel(loops: GroupLoops) -> tirx.Stmt:
    """Emit rows in parallel, a thread per row, level by level; split a single row into parts."""
    rows = math.prod(axis.extent for axis in loops.row_axes)
    if rows == 1 and loops.domain.size > 2 * GRAIN:
        return single_row_kernel(loops)
    if loops.group.column:
        return summed_rows_kernel(loops, rows)
    row = tirx.Var(ROW, "int32")
    body = sequence(loops.row_body(unflatten_axes(row, loops.row_axes)))
    is_parallel = loops.domain.size > GRAIN and rows > 1
    return For(row, 0, rows, ForKind.PARALLEL if is_parallel else ForKind.SERIAL, body)


def emit_opaque(results: list[Opaque]) -> Kernel:
    """Emit the kernel that computes these results: its statements are for a CPU already."""
    kernel = results[0].kernel
    buffers = OpaqueBuffers.declare(kernel)
    return buffers.finish(statements_of(kernel.emit(*buffers.arguments)), results)


def emit_copy(size: int, dtype: str) -> tirx.PrimFunc:
    """Emit a kernel (source, copy) for `size` elements of a physical dtype."""
    source = tirx.decl_buffer((size,), dtype, "source")
    copy = tirx.decl_buffer((size,), dtype, "copy")
    i = tirx.Var("i", "int32")
    store = tirx.BufferStore(copy, tirx.BufferLoad(source, [i]), [i])
    body = For(i, 0, size, ForKind.SERIAL, store)
    return tirx.PrimFunc([source, copy], body).with_attr("tirx.noalias", True)
