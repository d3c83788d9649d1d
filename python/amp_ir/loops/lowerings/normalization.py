# SPDX-License-Identifier: Apache-2.0
"""Lowering of layer and RMS normalization and of softmax's gradients: sums, then one pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from amp_ir.loops import math as m
from amp_ir.loops.body_context import let
from amp_ir.loops.builders import pointwise, reduce, reshape, squeeze
from amp_ir.loops.ir import Pointwise, Value, compute_dtype
from amp_ir.loops.lowering_registry import Lowering, lowers

Body = Callable[..., Any]
# A mean of `body` over groups of elements, computed in `dtype`.
Mean = Callable[[Body, str], Value]


def mean_over(x: Value, axes: Sequence[int]) -> Mean:
    """Return means over `axes` of the index space of x; the axes stay."""
    count = math.prod(x.shape[axis] for axis in axes)
    return lambda body, dtype: reduce("sum", x.shape, axes, body, dtype, divisor=count)


def statistics(
    x: Value, mean_of: Mean, eps: float, seen: Callable[[Value], Value] = lambda mean: mean
) -> tuple[Value, Value, Value]:
    """Compute (mean, variance, 1 / sqrt(variance + eps)) in two passes.

    `seen` makes of a mean what broadcasts to x.

    The error of the first mean adds its square to the mean square of the differences from it. The
    mean of these differences estimates that error: the corrected two-pass algorithm (Chan, Golub
    and LeVeque 1983).
    """
    dtype = compute_dtype(x.dtype)
    first = mean_of(lambda *i: x[i], dtype)
    near = seen(first)

    def distance(*i: Any) -> Any:
        return let(x[i] - near[i])

    def squared(*i: Any) -> Any:
        centered = distance(*i)
        return centered * centered

    square, drift = mean_of(squared, dtype), mean_of(distance, dtype)

    def corrected(*i: Any) -> Any:
        return m.maximum(square[i] - drift[i] * drift[i], m.constant(0.0, dtype))

    mean = pointwise(first.shape, dtype, lambda *i: first[i] + drift[i])
    variance = pointwise(square.shape, dtype, corrected)
    rstd = pointwise(
        variance.shape, dtype, lambda *i: m.rsqrt(variance[i] + m.constant(eps, dtype))
    )
    return mean, variance, rstd


def one_pass_statistics(x: Value, mean_of: Mean, eps: float) -> tuple[Value, Value, Value]:
    """Compute the same as `statistics` of float32 or narrower x in one pass, in float64.

    There squares are exact, and the difference mean(x^2) - mean(x)^2 has an error of 1e-16
    mean(x)^2: less than float32 has, unless the mean is thousands of standard deviations.
    """

    def wide(*i: Any) -> Any:
        return let(m.cast(x[i], "float64"))

    def squared(*i: Any) -> Any:
        element = wide(*i)
        return element * element

    square, first = mean_of(squared, "float64"), mean_of(wide, "float64")
    # All that follows reads this one, and so shares its kernel.
    center = pointwise(first.shape, "float64", lambda *i: first[i])

    def difference(*i: Any) -> Any:
        found = square[i] - center[i] * center[i]
        return m.cast(m.maximum(found, m.constant(0.0, "float64")), "float32")

    mean = pointwise(first.shape, "float32", lambda *i: m.cast(center[i], "float32"))
    variance = pointwise(square.shape, "float32", difference)
    rstd = pointwise(
        variance.shape, "float32", lambda *i: m.rsqrt(variance[i] + m.constant(eps, "float32"))
    )
    return mean, variance, rstd


def _affine(element: Any, index: Any, weight: Value | None, bias: Value | None) -> Any:
    if weight is not None:
        element = element * weight[index]
    return element if bias is None else element + bias[index]


def optional(rest: Sequence[Value], *flags: bool) -> list[Value | None]:
    """Return the optional arguments in order, None for those that are absent."""
    present = iter(rest)
    return [next(present) if flag else None for flag in flags]


def normalized(
    x: Value, mean: Value, rstd: Value, weight: Value | None, bias: Value | None, dtype: str
) -> Value:
    """Compute (x - mean) * rstd, then weight and bias where there are any."""
    return pointwise(
        x.shape, dtype, lambda *i: _affine((x[i] - mean[i]) * rstd[i], i, weight, bias)
    )


def input_gradient(
    grad: Value,
    x: Value,
    mean: Value | None,
    rstd: Value,
    weight: Value | None,
    mean_of: Mean,
    dtype: str,
) -> Value:
    """Compute rstd * (g - mean(g) - n * mean(g n)), g = grad * weight, n the normalized input.

    The means are `mean_of`. Without `mean` (RMS normalization) the second term is absent.
    """
    wide = compute_dtype(grad.dtype)

    def scaled(*i: Any) -> Any:
        return _affine(grad[i], i, weight, None)

    def normal(*i: Any) -> Any:
        return (x[i] if mean is None else x[i] - mean[i]) * rstd[i]

    mean_scaled = None if mean is None else mean_of(scaled, wide)
    mean_product = mean_of(lambda *i: scaled(*i) * normal(*i), wide)

    def body(*i: Any) -> Any:
        rest = scaled(*i) if mean_scaled is None else scaled(*i) - mean_scaled[i]
        return rstd[i] * (rest - normal(*i) * mean_product[i])

    return pointwise(grad.shape, dtype, body)


def weight_gradient(
    grad: Value, x: Value, mean: Value | None, rstd: Value, axes: Sequence[int], dtype: str
) -> Value:
    """Sum grad * n over `axes`; the axes stay."""

    def body(*i: Any) -> Any:
        return grad[i] * (x[i] if mean is None else x[i] - mean[i]) * rstd[i]

    return _sum(grad.shape, axes, body, dtype)


def _sum(shape: Sequence[int], axes: Sequence[int], body: Body, dtype: str) -> Value:
    if not axes:
        return pointwise(shape, dtype, body)
    return reduce("sum", shape, axes, body, dtype)


def _last_axes(x: Value, ndim_normalized: int) -> range:
    return range(len(x.shape) - ndim_normalized, len(x.shape))


def _batch_axes(x: Value, ndim_normalized: int) -> range:
    return range(len(x.shape) - ndim_normalized)


@lowers("amp_ir.layer_norm")
def layer_norm(
    op: Lowering,
    x: Value,
    *rest: Value,
    ndim_normalized: int,
    eps: float,
    has_weight: bool = True,
    has_bias: bool = True,
) -> tuple[Value, ...]:
    """Compute two row sums, then one pass."""
    mean, _, rstd = statistics(x, mean_over(x, _last_axes(x, ndim_normalized)), eps)
    weight, bias = optional(rest, has_weight, has_bias)
    return normalized(x, mean, rstd, weight, bias, op.results[0].dtype), mean, rstd


@lowers("amp_ir.layer_norm_backward_input")
def layer_norm_backward_input(
    op: Lowering,
    grad: Value,
    x: Value,
    mean: Value,
    rstd: Value,
    *rest: Value,
    ndim_normalized: int,
    has_weight: bool = True,
) -> Value:
    """Compute two row sums, then one pass."""
    (weight,) = optional(rest, has_weight)
    mean_of = mean_over(grad, _last_axes(x, ndim_normalized))
    return input_gradient(grad, x, mean, rstd, weight, mean_of, op.results[0].dtype)


@lowers("amp_ir.layer_norm_backward_weight")
def layer_norm_backward_weight(
    op: Lowering, grad: Value, x: Value, mean: Value, rstd: Value, *, ndim_normalized: int
) -> tuple[Value, ...]:
    """Compute two column sums in one pass."""
    result, axes = op.results[0], _batch_axes(x, ndim_normalized)
    dweight = weight_gradient(grad, x, mean, rstd, axes, result.dtype)
    dbias = _sum(grad.shape, axes, lambda *i: grad[i], result.dtype)
    return squeeze(dweight, result.shape), squeeze(dbias, result.shape)


@lowers("amp_ir.rms_norm")
def rms_norm(
    op: Lowering,
    x: Value,
    *rest: Value,
    ndim_normalized: int,
    eps: float,
    has_weight: bool = True,
) -> tuple[Value, ...]:
    """Compute one row sum, then one pass."""
    dtype = compute_dtype(x.dtype)
    mean_of = mean_over(x, _last_axes(x, ndim_normalized))
    square = mean_of(lambda *i: x[i] * x[i], dtype)
    rstd = pointwise(square.shape, dtype, lambda *i: m.rsqrt(square[i] + m.constant(eps, dtype)))
    (weight,) = optional(rest, has_weight)
    y = pointwise(x.shape, op.results[0].dtype, lambda *i: _affine(x[i] * rstd[i], i, weight, None))
    return y, rstd


@lowers("amp_ir.rms_norm_backward_input")
def rms_norm_backward_input(
    op: Lowering,
    grad: Value,
    x: Value,
    rstd: Value,
    *rest: Value,
    ndim_normalized: int,
    has_weight: bool = True,
) -> Value:
    """Compute one row sum, then one pass."""
    (weight,) = optional(rest, has_weight)
    mean_of = mean_over(grad, _last_axes(x, ndim_normalized))
    return input_gradient(grad, x, None, rstd, weight, mean_of, op.results[0].dtype)


@lowers("amp_ir.rms_norm_backward_weight")
def rms_norm_backward_weight(
    op: Lowering, grad: Value, x: Value, rstd: Value, *, ndim_normalized: int
) -> Value:
    """Compute one column sum."""
    result = op.results[0]
    axes = _batch_axes(x, ndim_normalized)
    return squeeze(weight_gradient(grad, x, None, rstd, axes, result.dtype), result.shape)


@lowers("amp_ir.softmax_backward")
def softmax_backward(op: Lowering, grad: Value, y: Value, *, axis: int) -> Value:
    """Compute one row sum, then one pass."""
    dot = reduce("sum", grad.shape, (axis,), lambda *i: grad[i] * y[i], compute_dtype(grad.dtype))
    return pointwise(y.shape, op.results[0].dtype, lambda *i: (grad[i] - dot[i]) * y[i])


@lowers("amp_ir.log_softmax_backward")
def log_softmax_backward(op: Lowering, grad: Value, y: Value, *, axis: int) -> Value:
    """Compute one row sum, then one pass; for a class loss the sum is the target's element."""
    axis %= len(grad.shape)
    if isinstance(grad, Pointwise) and grad.one_hot is not None and grad.one_hot[0] == axis:
        ones = [1 if k == axis else n for k, n in enumerate(grad.shape)]
        total: Value = reshape(grad.one_hot[1], ones)
    else:
        total = reduce("sum", grad.shape, (axis,), lambda *i: grad[i], compute_dtype(grad.dtype))
    parts = y.log_softmax if isinstance(y, Pointwise) else None
    weights = None if parts is None else parts.softmax

    def body(*i: Any) -> Any:
        weight = m.exp(y[i]) if weights is None else weights[i]
        return grad[i] - weight * total[i]

    return pointwise(y.shape, op.results[0].dtype, body)
