# SPDX-License-Identifier: Apache-2.0
"""Lowering of loss scaling: scalars, and one pass over the gradients."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from amp_ir.loops import math as m
from amp_ir.loops.body_context import let
from amp_ir.loops.builders import pointwise, reduce, squeeze
from amp_ir.loops.ir import Value, compute_dtype
from amp_ir.loops.lowering_registry import Lowering, lowers


@lowers("amp_ir.scale_loss")
def scale_loss(op: Lowering, x: Value, scale: Value) -> Value:
    """Multiply by one scalar."""
    wide = compute_dtype(x.dtype)
    return pointwise(
        op.results[0].shape, op.results[0].dtype, lambda *i: x[i] * m.cast(scale[()], wide)
    )


@lowers("amp_ir.unscale")
def unscale(op: Lowering, grad: Value, scale: Value) -> Value:
    """Multiply by the reciprocal, which is exact for a power of two."""
    inverse = _reciprocal(scale, compute_dtype(grad.dtype))
    return pointwise(op.results[0].shape, op.results[0].dtype, lambda *i: grad[i] * inverse[()])


def _reciprocal(scale: Value, dtype: str) -> Value:
    """Compute the reciprocal as a scalar value: one division for all gradients."""

    def body() -> Any:
        return m.cast(m.constant(1.0, "float64") / m.cast(scale[()], "float64"), dtype)

    key = f"reciprocal:{dtype}"
    if key not in scale.derived:
        scale.derived[key] = pointwise((), dtype, body)
    return scale.derived[key]


# The bits of a float without its sign: as integers they order as the numbers do, with infinity
# and then every NaN at the end. So one integer maximum tells whether all are finite, whatever the
# payload of a NaN, and without TVM's simplifier, which takes NaNs for impossible.
_MAGNITUDE = {"float32": 0x7FFFFFFF, "float64": 0x7FFFFFFFFFFFFFFF}
_INFINITY = {"float32": 0x7F800000, "float64": 0x7FF0000000000000}


def _is_finite(gradient: Value) -> Value:
    """Return bool[]: whether all elements are finite."""
    dtype = compute_dtype(gradient.dtype)
    integer = dtype.replace("float", "int")

    def magnitude(*i: Any) -> Any:
        bits = tirx.reinterpret(integer, gradient[i])
        return tirx.bitwise_and(bits, tirx.const(_MAGNITUDE[dtype], integer))

    largest: Value
    if not gradient.shape:
        largest = pointwise((), integer, magnitude)
    else:
        axes = range(len(gradient.shape))
        found = reduce("max", gradient.shape, axes, magnitude, integer, is_gate=True)
        largest = squeeze(found, ())
    limit = tirx.const(_INFINITY[dtype], integer)
    return pointwise((), "bool", lambda: largest[()] < limit)


def _sum_of_squares(gradient: Value, scale: Value) -> Value:
    """Return f32[] (f64[] for f64): the sum of squares of the gradient divided by the scale."""
    dtype = compute_dtype(gradient.dtype)
    inverse = _reciprocal(scale, dtype)

    def square(*i: Any) -> Any:
        element = let(gradient[i] * inverse[()])
        return element * element

    if not gradient.shape:
        return pointwise((), dtype, square)
    axes = range(len(gradient.shape))
    return squeeze(reduce("sum", gradient.shape, axes, square, dtype, is_gate=True), ())


@lowers("amp_ir.all_finite")
def all_finite(op: Lowering, *values: Value) -> tuple[Value, Value]:
    """Compute both results in one pass over each gradient, then a scalar kernel."""
    *gradients, scale = values
    flags = [_is_finite(one) for one in gradients]
    squares = [_sum_of_squares(one, scale) for one in gradients]

    def every() -> Any:
        result = flags[0][()]
        for flag in flags[1:]:
            result = tirx.bitwise_and(result, flag[()])
        return result

    def norm() -> Any:
        total = m.constant(0.0)
        for square in squares:
            total = let(total + m.cast(square[()], "float32"))
        return m.sqrt(total)

    return pointwise((), "bool", every), pointwise((), "float32", norm)


@lowers("amp_ir.update_scale")
def update_scale(
    op: Lowering,
    scale: Value,
    growth_tracker: Value,
    hysteresis_tracker: Value,
    found_inf: Value,
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
    min_scale: float,
    max_scale: float,
) -> tuple[Value, ...]:
    """Compute the scalars of `dialect/loss_scale.next_scale`."""
    dtype = compute_dtype(scale.dtype)

    def number(value: float) -> Any:
        return m.constant(value, dtype)

    def clean() -> Any:
        return growth_tracker[()] + tirx.const(1, "int32")

    def grows() -> Any:
        return clean() == tirx.const(growth_interval, "int32")

    def new_scale() -> Any:
        now = let(scale[()])
        # Infinity is above every limit, so a scale that would not be finite stays as it is.
        grown = let(now * number(growth_factor))
        finite = grown <= number(_LARGEST[dtype])
        higher = tirx.max(now, tirx.min(grown, number(max_scale)))
        after_clean = m.select(tirx.all(grows(), finite), higher, now)
        lower = tirx.min(now, tirx.max(now * number(backoff_factor), number(min_scale)))
        tolerated = hysteresis_tracker[()] > tirx.const(1, "int32")
        return m.select(found_inf[()], m.select(tolerated, now, lower), after_clean)

    def new_growth() -> Any:
        stops = tirx.any(found_inf[()], grows())
        return m.select(stops, tirx.const(0, "int32"), clean())

    def new_hysteresis() -> Any:
        less = hysteresis_tracker[()] - tirx.const(1, "int32")
        return m.select(found_inf[()], less, tirx.const(hysteresis, "int32"))

    return (
        pointwise((), scale.dtype, new_scale),
        pointwise((), "int32", new_growth),
        pointwise((), "int32", new_hysteresis),
    )


_LARGEST = {"float32": 3.4028234663852886e38, "float64": 1.7976931348623157e308}
