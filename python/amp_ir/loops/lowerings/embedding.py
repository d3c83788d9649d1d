# SPDX-License-Identifier: Apache-2.0
"""Lowering of table look-up and of the table's gradient."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from amp_ir.loops.builders import opaque, pointwise
from amp_ir.loops.codegen.kernel_buffers import FlatBuffer
from amp_ir.loops.cpu.scatter_rows import scatter_rows
from amp_ir.loops.ir import Opaque, Value
from amp_ir.loops.lowering_registry import Lowering, lowers
from amp_ir.loops.lowerings.gather import row_index
from amp_ir.loops.table_sum import TableSum


@lowers("amp_ir.embedding")
def embedding(op: Lowering, weight: Value, ids: Value) -> Value:
    """Gather rows of `weight` at `ids`."""
    result = op.results[0]

    def body(*i: Any) -> Any:
        return weight[(row_index(ids[i[:-1]], weight.shape[0]), i[-1])]

    return pointwise(result.shape, result.dtype, body)


@lowers("amp_ir.embedding_backward")
def embedding_backward(
    op: Lowering,
    grad: Value,
    ids: Value,
    base: Value | None = None,
    *factors: Value,
    **options: Any,
) -> Opaque:
    """Sum the rows of `grad` of each id, in order: exact, and parallel over ids and columns.

    With `base`, which accumulate_rows.py adds, the sums, times the factors, are added to it, in its
    memory if that has no other reader: then no row without an id is touched.
    """
    result = op.results[0]
    padding_idx = options.get("padding_idx")

    def table_of(inputs: list[FlatBuffer], outputs: list[FlatBuffer]) -> TableSum:
        start = inputs[2] if base is not None else None
        return TableSum(inputs[0], inputs[1], outputs[0], padding_idx, start, inputs[3:])

    def emit(inputs: list[FlatBuffer], outputs: list[FlatBuffer]) -> tirx.Stmt:
        return scatter_rows(table_of(inputs, outputs))

    def emit_cuda(inputs: list[FlatBuffer], outputs: list[FlatBuffer]) -> list[tirx.Stmt]:
        from amp_ir.loops.cuda.scatter_rows import scatter_launches

        return scatter_launches(table_of(inputs, outputs))

    inputs = [grad, ids] if base is None else [grad, ids, base, *factors]
    pairs = () if base is None else ((0, 2),)
    return opaque("embedding_backward", inputs, [result], emit, pairs, emit_cuda)[0]
