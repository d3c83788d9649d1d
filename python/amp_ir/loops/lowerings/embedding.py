# SPDX-License-Identifier: Apache-2.0
"""Lowering of table look-up and of the table's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx

from amp_ir.loops.builders import pointwise
from amp_ir.loops.codegen.kernel_buffers import FlatBuffer
from amp_ir.loops.ir import Value
from amp_ir.loops.lowering_registry import Lowering, lowers
from amp_ir.loops.lowerings.gather import row_index
from amp_ir.loops.lowerings.table_rows import AddedRows, sums_from_zero, sums_onto


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

    def id_of(buffers: Sequence[FlatBuffer], item: Any) -> Any:
        return tirx.Cast("int32", buffers[0].load(item))

    added = AddedRows(
        "embedding_backward", grad, [ids], id_of, ids.size, result,
        padding_idx=options.get("padding_idx"),
    )  # fmt: skip
    return sums_from_zero(op, added) if base is None else sums_onto(base, added, factors)
