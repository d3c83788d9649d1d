# SPDX-License-Identifier: Apache-2.0
"""Lowering of table look-up and of the table's gradient."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from amp_ir.loops import math as m
from amp_ir.loops.body_context import let
from amp_ir.loops.builders import opaque, pointwise
from amp_ir.loops.codegen.kernel_buffers import FlatBuffer
from amp_ir.loops.cpu.scatter_rows import scatter_rows, sum_rows
from amp_ir.loops.ir import TensorSpec, Value, compute_dtype
from amp_ir.loops.lowering_registry import Lowering, lowers
from amp_ir.loops.lowerings.gather import row_index
from amp_ir.loops.table_sum import TableSum

# A table of so many times the elements of the rows that are summed into it is mostly zeros, and
# which row is where takes little beside rows of so many columns.
_FEW = 8


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
) -> Value:
    """Sum the rows of `grad` of each id, in order: exact, and parallel over ids and columns.

    With `base`, which accumulate_rows.py adds, the sums, times the factors, are added to it, in its
    memory if that has no other reader: then no row without an id is touched.
    """
    result = op.results[0]
    padding_idx = options.get("padding_idx")
    are_few = 0 < grad.size * _FEW <= result.size and result.shape[1] >= _FEW
    # A GPU's kernels add a chunk of items each, wherever their ids lie.
    if are_few and base is None and not op.arithmetic_is_free:
        return _by_rows(grad, ids, result, padding_idx)

    def table_of(inputs: list[FlatBuffer], outputs: list[FlatBuffer]) -> TableSum:
        start = inputs[2] if base is not None else None
        factors, height = inputs[3:], result.shape[0]
        return TableSum(inputs[0], inputs[1], outputs[0], padding_idx, start, factors, height)

    def emit(inputs: list[FlatBuffer], outputs: list[FlatBuffer]) -> tirx.Stmt:
        return scatter_rows(table_of(inputs, outputs))

    def emit_cuda(inputs: list[FlatBuffer], outputs: list[FlatBuffer]) -> list[tirx.Stmt]:
        from amp_ir.loops.cuda.scatter_rows import scatter_launches

        return scatter_launches(table_of(inputs, outputs))

    inputs = [grad, ids] if base is None else [grad, ids, base, *factors]
    pairs = () if base is None else ((0, 2),)
    return opaque("embedding_backward", inputs, [result], emit, pairs, emit_cuda)[0]


def _by_rows(grad: Value, ids: Value, result: TensorSpec, padding_idx: int | None) -> Value:
    """Return the gradient as a view of the sums of few rows, which its readers compute.

    A norm and an optimizer's update read the sums; no table of zeros is in memory for them.
    """
    height, width = result.shape

    def emit(inputs: list[FlatBuffer], outputs: list[FlatBuffer]) -> tirx.Stmt:
        (rows, items), (sums, first) = inputs, outputs
        return sum_rows(TableSum(rows, items, sums, padding_idx, None, [], height), first)

    specs = [TensorSpec((ids.size, width), result.dtype), TensorSpec((height,), "int32")]
    sums, first = opaque("embedding_backward", [grad, ids], specs, emit)

    def body(row: Any, column: Any) -> Any:
        item = let(first[(row,)])
        zero = m.constant(0.0, compute_dtype(result.dtype))
        return m.select(item < 0, zero, sums[(let(m.clamp(item, ids.size)), column)])

    return pointwise(result.shape, result.dtype, body)
