# SPDX-License-Identifier: Apache-2.0
"""Lowerings of ops that read elements at indices which are data."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from amp_ir.loops import math as m
from amp_ir.loops.body_context import let
from amp_ir.loops.builders import pointwise
from amp_ir.loops.ir import Value
from amp_ir.loops.lowering_registry import Lowering, lowers


@lowers("relax.take")
def take(op: Lowering, x: Value, ids: Value) -> Value:
    """Gather slices of x at ids along an axis."""
    result = op.results[0]
    axis = op.call.attrs.axis
    axis = int(axis) % len(x.shape) if axis is not None else 0
    rank = len(ids.shape)

    def body(*i: Any) -> Any:
        at = row_index(ids[tuple(i[axis : axis + rank])], x.shape[axis])
        return x[(*i[:axis], at, *i[axis + rank :])]

    return pointwise(result.shape, result.dtype, body)


def row_index(element: Any, extent: int) -> Any:
    """Return an id read from memory as an index in [0, extent); negative ids count from the end."""
    at = let(tirx.Cast("int32", element))
    wrapped = m.select(at < tirx.const(0, "int32"), at + tirx.const(extent, "int32"), at)
    return let(m.clamp(wrapped, extent))


@lowers("relax.gather_elements")
def gather_elements(op: Lowering, x: Value, ids: Value) -> Value:
    """Gather x[..., ids[i], ...] along one axis."""
    axis = int(op.call.attrs.axis) % len(x.shape)

    def body(*i: Any) -> Any:
        at = row_index(ids[i], x.shape[axis])
        return x[tuple(at if d == axis else k for d, k in enumerate(i))]

    return pointwise(op.results[0].shape, op.results[0].dtype, body)
