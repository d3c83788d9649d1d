# SPDX-License-Identifier: Apache-2.0
"""CUDA emitter: one launch per group, or several where blocks must wait for each other.

    no reduction            every thread computes one vector of elements (rows.py)
    over columns            threads of a block share a row (rows.py); several blocks share a
                            row where rows are few and long, one launch per level (rows.py)
    over rows               blocks divide the rows for a tile of columns (tiles.py)
    over either             each block takes some rows and has its own sums of the columns
                            (summed_rows.py)

Loads and stores are vectors of 16 bytes where alignment allows; arithmetic is in the compute
dtype. Blocks exchange data through workspace that the caller provides. All sums run in a fixed
order: the same input gives the same bits.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from amp_ir.cuda.prelude import BFLOAT16_BITS, MAXIMUM, MINIMUM
from amp_ir.loops.codegen.kernel import GroupBuffers, Kernel
from amp_ir.loops.codegen.loop_domain import loop_domain
from amp_ir.loops.codegen.statements import sequence
from amp_ir.loops.cuda.group_elements import GroupElements
from amp_ir.loops.cuda.launch import THREADS, guarded, launch
from amp_ir.loops.cuda.opaque_launches import emit_opaque
from amp_ir.loops.cuda.rows import flat_launch, rows_launch, split_launches
from amp_ir.loops.cuda.summed_rows import summed_rows_launches
from amp_ir.loops.cuda.tiles import columns_launches
from amp_ir.loops.elements import DeviceFunctions, dtype_of, written_for
from amp_ir.loops.group import Group
from amp_ir.loops.ir import Reduction

__all__ = ["emit_copy", "emit_group", "emit_opaque"]

# Several blocks share each row where rows are fewer than the first and at least as long as the
# second.
FEW_ROWS, LONG_ROW = 64, 16384


def emit_group(group: Group, *, strict: bool = False) -> Kernel:
    """Emit the kernel of a group."""
    buffers = GroupBuffers.declare(group)
    elements = GroupElements(group, buffers.by_value, loop_domain(group), strict)
    with written_for(_DEVICE):
        body = sequence(_launches(elements))
    return buffers.finish(body, elements.workspace)


def _fence(x: Any) -> Any:
    """Return `x` added to -0 by a CUDA function that no contraction fuses."""
    dtype = dtype_of(x)
    function = "__dadd_rn" if dtype == "float64" else "__fadd_rn"
    return tirx.call_pure_extern(dtype, function, x, tirx.const(-0.0, dtype))


# CUDA's own functions are accurate to 2 units in the last place (they are no "fast math"), except
# for the quotient, whose divisor must be below 2^126.
_FUNCTIONS = {
    "exp": "expf", "log": "logf", "tanh": "tanhf", "erf": "erff", "quotient": "__fdividef",
    "maximum": MAXIMUM, "minimum": MINIMUM,
}  # fmt: skip
_DEVICE = DeviceFunctions(
    _fence, _FUNCTIONS, lambda x: tirx.call_pure_extern("uint16", BFLOAT16_BITS, x)
)


def _launches(elements: GroupElements) -> list[tirx.Stmt]:
    """Return the launches of the kernel, in order."""
    if elements.domain.keeps_innermost or elements.only_sums_rows:
        return columns_launches(elements)
    if elements.group.column:
        return summed_rows_launches(elements)
    if not any(isinstance(value, Reduction) for value in elements.group.row):
        return [flat_launch(elements)]
    if elements.rows < FEW_ROWS and elements.domain.columns >= LONG_ROW:
        return split_launches(elements)
    return [rows_launch(elements)]


def emit_copy(size: int, dtype: str) -> tirx.PrimFunc:
    """Emit a kernel (source, copy) for `size` elements of a physical dtype."""
    source = tirx.decl_buffer((size,), dtype, "source")
    copy = tirx.decl_buffer((size,), dtype, "copy")
    blocks = -(-size // THREADS)

    def body(block: Any, thread: Any) -> list[tirx.Stmt]:
        at = block * THREADS + thread
        store = tirx.BufferStore(copy, tirx.BufferLoad(source, [at]), [at])
        return guarded(at < size if size % THREADS else None, [store])

    function = tirx.PrimFunc([source, copy], launch(blocks, THREADS, body))
    return function.with_attr("tirx.noalias", True)
