# SPDX-License-Identifier: Apache-2.0
"""Lowerings of Relax's reductions, and of softmax."""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx

from amp_ir.loops import math as m
from amp_ir.loops.body_context import let
from amp_ir.loops.builders import pointwise, reduce, reshape
from amp_ir.loops.codegen.kernel_buffers import stored_element
from amp_ir.loops.ir import LogSoftmax, Value, compute_dtype
from amp_ir.loops.lowering_registry import Lowering, lowers

_REDUCTIONS = {"relax.sum": "sum", "relax.max": "max", "relax.min": "min", "relax.prod": "prod"}


@lowers("relax.sum", "relax.max", "relax.min", "relax.prod", "relax.mean")
def reduction(op: Lowering, x: Value) -> Value:
    """Reduce by sum, mean, maximum, minimum or product over some axes."""
    result = op.results[0]
    axes = op.call.attrs.axis
    over = [int(a) % len(x.shape) for a in axes] if axes is not None else range(len(x.shape))
    axes_tuple = tuple(sorted(over))
    if not x.shape:
        return reshape(x, result.shape)
    dtype = compute_dtype(result.dtype)
    kind: Any = _REDUCTIONS.get(op.name, "sum")
    flags = {}
    if op.name == "relax.mean":
        flags["divisor"] = math.prod(x.shape[axis] for axis in axes_tuple)
    total = reduce(kind, x.shape, axes_tuple, lambda *i: m.cast(x[i], dtype), dtype, **flags)
    if dtype == result.dtype:
        return reshape(total, result.shape)
    rounded = pointwise(total.shape, result.dtype, lambda *i: total[i])
    return reshape(rounded, result.shape)


@lowers("relax.nn.softmax", "relax.nn.log_softmax")
def softmax(op: Lowering, x: Value) -> Value:
    """Compute exp(x - max) / sum, or x - max - log(sum), along one axis."""
    axis = int(op.call.attrs.axis) % len(x.shape)
    dtype, wide = op.results[0].dtype, compute_dtype(x.dtype)
    # NaN in a row is in its sum.
    peak = reduce("largest", x.shape, (axis,), lambda *i: x[i], wide)

    def shifted(*i: Any) -> Any:
        return m.rounded(x[i]) - peak[i]

    exponential = pointwise(x.shape, wide, lambda *i: m.exp(shifted(*i)), is_held=True)
    total = reduce("sum", x.shape, (axis,), lambda *i: exponential[i], wide)
    scale = pointwise(total.shape, wide, lambda *i: m.constant(1.0, wide) / total[i])
    if op.name == "relax.nn.softmax":
        return pointwise(x.shape, dtype, lambda *i: exponential[i] * scale[i])
    # Not x - (peak + log): near the peak the sum of the two would round away the difference.
    log_total = pointwise(total.shape, wide, lambda *i: m.log(total[i]))
    result = pointwise(x.shape, dtype, lambda *i: shifted(*i) - log_total[i])
    if dtype == wide and not op.arithmetic_is_free:
        weights = pointwise(x.shape, wide, lambda *i: exponential[i] * scale[i])
        result.log_softmax = LogSoftmax(axis, x, peak, log_total, weights)
    return result


@lowers("relax.argmax", "relax.argmin")
def arg_reduction(op: Lowering, x: Value) -> Value:
    """Return the position of the first extreme along one axis (or of the flattened value)."""
    result = op.results[0]
    axis = op.call.attrs.axis
    source = x if axis is not None else reshape(x, (x.size,))
    d = int(axis) % len(x.shape) if axis is not None else 0
    is_max = op.name == "relax.argmax"
    dtype = compute_dtype(x.dtype)

    def read(*i: Any) -> Any:
        return stored_element(source, i)

    best = reduce("max" if is_max else "min", source.shape, (d,), read, dtype)
    far = m.constant(2**31 - 1, "int32")

    def position(*i: Any) -> Any:
        element, extreme = let(read(*i)), let(best[i])
        hit = tirx.any(tirx.EQ(element, extreme), m.isnan(element))
        return m.select(hit, i[d], far)

    first = reduce("min", source.shape, (d,), position, "int32")
    wide = pointwise(first.shape, result.dtype, lambda *i: m.cast(first[i], result.dtype))
    return reshape(wide, result.shape)
