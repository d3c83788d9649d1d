# SPDX-License-Identifier: Apache-2.0
"""Lowering of the average over ranks; the exchange itself is a call of the process group."""

from __future__ import annotations

from amp_ir.loops.builders import pointwise
from amp_ir.loops.ir import Value, compute_dtype
from amp_ir.loops.lowering_registry import Lowering, lowers
from amp_ir.loops.math import constant


@lowers("amp_ir.average")
def average(op: Lowering, x: Value, *, ranks: int) -> Value:
    """Multiply by 1 / ranks, as DistributedDataParallel does."""
    factor = constant(1 / ranks, compute_dtype(x.dtype))
    return pointwise(op.results[0].shape, op.results[0].dtype, lambda *i: x[i] * factor)
