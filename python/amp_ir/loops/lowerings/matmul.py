# SPDX-License-Identifier: Apache-2.0
"""Matmul as a plain sum, correct and slow: for dtypes that no library takes (float64, integers)."""

from __future__ import annotations

from typing import Any

from amp_ir.loops import math as m
from amp_ir.loops.builders import pointwise, reduce, reshape
from amp_ir.loops.ir import Value, compute_dtype
from amp_ir.loops.lowering_registry import Lowering, lowers


@lowers("relax.matmul")
def matmul(op: Lowering, a: Value, b: Value) -> Value:
    """Sum a[..., i, k] * b[..., k, j] over k; leading dimensions broadcast, as in NumPy."""
    result = op.results[0]
    dtype = compute_dtype(result.dtype)
    left = a if len(a.shape) > 1 else reshape(a, (1, *a.shape))
    right = b if len(b.shape) > 1 else reshape(b, (*b.shape, 1))
    batch_rank = max(len(left.shape), len(right.shape)) - 2
    batch = result.shape[:batch_rank]
    space = (*batch, left.shape[-2], right.shape[-1], left.shape[-1])

    def product(*index: Any) -> Any:
        *outer, i, j, k = index
        first = m.cast(left[(*outer[batch_rank - len(left.shape) + 2 :], i, k)], dtype)
        second = m.cast(right[(*outer[batch_rank - len(right.shape) + 2 :], k, j)], dtype)
        return first * second

    total = reduce("sum", space, (len(space) - 1,), product, dtype)
    if dtype == result.dtype:
        return reshape(total, result.shape)
    rounded = pointwise(total.shape, result.dtype, lambda *i: total[i])
    return reshape(rounded, result.shape)
