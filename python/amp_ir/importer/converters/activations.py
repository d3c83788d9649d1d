# SPDX-License-Identifier: Apache-2.0
"""Activation functions and their gradients, as fused ops where the dialect has them."""

from __future__ import annotations

import math

import torch
from tvm import relax

from amp_ir.importer.converters.emitter import Emitter
from amp_ir.importer.converters.promotion import (
    Operand,
    Scalar,
    dtype_of,
    is_float,
    is_scalar,
    shape_of,
)
from amp_ir.importer.converters.registry import Converter, converts

aten = torch.ops.aten

# Overloads whose arguments are those of a dialect op, in order, without options.
SAME_ARGUMENTS: dict[torch._ops.OpOverload, str] = {
    aten.silu_backward.default: "amp_ir.silu_backward",
    aten.tanh_backward.default: "amp_ir.tanh_backward",
    aten.sigmoid_backward.default: "amp_ir.sigmoid_backward",
    aten.hardswish_backward.default: "amp_ir.hardswish_backward",
    aten.hardsigmoid_backward.default: "amp_ir.hardsigmoid_backward",
    aten.mish.default: "amp_ir.mish",
    aten.mish_backward.default: "amp_ir.mish_backward",
}


def _same_arguments(name: str) -> Converter:
    def convert(ops: Emitter, *tensors: relax.Expr) -> relax.Expr:
        return gradient(ops, name, *tensors)

    return convert


for _overload, _name in SAME_ARGUMENTS.items():
    converts(_overload)(_same_arguments(_name))


def gradient(ops: Emitter, name: str, *tensors: relax.Expr, **options: object) -> relax.Expr:
    """Call a pointwise dialect op, whose arguments all have the shape and dtype of the result."""
    operands = [ops.broadcast(ops.cast(x, ops.dtype), ops.shape) for x in tensors]
    result: relax.Expr = ops.call(name, *operands, **options)
    return result


@converts(aten.relu.default)
def relu(ops: Emitter, x: relax.Expr) -> relax.Expr:
    """Return the larger of x and 0."""
    if not is_float(dtype_of(x)):
        return ops.emit(relax.op.maximum(x, ops.constant(0, dtype_of(x))))
    return ops.emit(relax.op.nn.relu(x))


@converts(aten.threshold_backward.default)
def threshold_backward(
    ops: Emitter, grad: relax.Expr, x: relax.Expr, threshold: Scalar
) -> relax.Expr:
    """Return the gradient where x (or relu's result) is above the threshold."""
    return gradient(ops, "amp_ir.relu_backward", grad, x, threshold=float(threshold))


@converts(aten.threshold.default)
def threshold(ops: Emitter, x: relax.Expr, bound: Operand, value: Operand) -> relax.Expr:
    """Return x where it is above the threshold, else the value."""
    if is_scalar(bound) and not is_float(dtype_of(x)):
        # An integer is at most the threshold where it is at most the largest integer below that.
        bound = math.floor(bound)
    low = ops.binary(relax.op.less_equal, x, ops.cast(bound, dtype_of(x)))
    return ops.where(low, ops.cast(value, dtype_of(x)), x)


@converts(aten.gelu.default)
def gelu(ops: Emitter, x: relax.Expr, *, approximate: str = "none") -> relax.Expr:
    """Return x times the normal distribution function of x, exact or by tanh."""
    return ops.emit(relax.op.nn.gelu_tanh(x) if approximate == "tanh" else relax.op.nn.gelu(x))


@converts(aten.gelu_backward.default)
def gelu_backward(
    ops: Emitter, grad: relax.Expr, x: relax.Expr, *, approximate: str = "none"
) -> relax.Expr:
    """Return the gradient of gelu."""
    return gradient(ops, "amp_ir.gelu_backward", grad, x, approximate=approximate)


@converts(aten.silu.default)
def silu(ops: Emitter, x: relax.Expr) -> relax.Expr:
    """Return x * sigmoid(x)."""
    return ops.emit(relax.op.nn.silu(x))


@converts(aten.leaky_relu.default)
def leaky_relu(ops: Emitter, x: relax.Expr, negative_slope: Scalar = 0.01) -> relax.Expr:
    """Return x where positive, else negative_slope * x."""
    return ops.emit(relax.op.nn.leakyrelu(x, float(negative_slope)))


@converts(aten.leaky_relu_backward.default)
def leaky_relu_backward(
    ops: Emitter, grad: relax.Expr, x: relax.Expr, negative_slope: Scalar, self_is_result: bool
) -> relax.Expr:
    """Return the gradient of leaky_relu; for a slope >= 0 the result has the sign of the input."""
    return gradient(ops, "amp_ir.leaky_relu_backward", grad, x, slope=float(negative_slope))


@converts(aten.elu.default)
def elu(
    ops: Emitter, x: relax.Expr, alpha: Scalar = 1, scale: Scalar = 1, input_scale: Scalar = 1
) -> relax.Expr:
    """Return scale * x where positive, else scale * alpha * (exp(input_scale * x) - 1)."""
    return gradient(
        ops,
        "amp_ir.elu",
        x,
        alpha=float(alpha),
        scale=float(scale),
        input_scale=float(input_scale),
    )


@converts(aten.elu_backward.default)
def elu_backward(
    ops: Emitter,
    grad: relax.Expr,
    alpha: Scalar,
    scale: Scalar,
    input_scale: Scalar,
    is_result: bool,
    x_or_y: relax.Expr,
) -> relax.Expr:
    """Return the gradient of elu, from its input or its result."""
    return gradient(
        ops,
        "amp_ir.elu_backward",
        grad,
        x_or_y,
        alpha=float(alpha),
        scale=float(scale),
        input_scale=float(input_scale),
        is_result=is_result,
    )


@converts(aten.celu.default)
def celu(ops: Emitter, x: relax.Expr, alpha: Scalar = 1.0) -> relax.Expr:
    """Return elu with input_scale = 1 / alpha."""
    return gradient(
        ops, "amp_ir.elu", x, alpha=float(alpha), scale=1.0, input_scale=1.0 / float(alpha)
    )


@converts(aten.softplus.default)
def softplus(ops: Emitter, x: relax.Expr, beta: Scalar = 1, threshold: Scalar = 20) -> relax.Expr:
    """Return log(1 + exp(beta * x)) / beta; x where beta * x is above the threshold."""
    return gradient(ops, "amp_ir.softplus", x, beta=float(beta), threshold=float(threshold))


@converts(aten.softplus_backward.default)
def softplus_backward(
    ops: Emitter, grad: relax.Expr, x: relax.Expr, beta: Scalar, threshold: Scalar
) -> relax.Expr:
    """Return the gradient of softplus."""
    return gradient(
        ops, "amp_ir.softplus_backward", grad, x, beta=float(beta), threshold=float(threshold)
    )


@converts(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(ops: Emitter, x: relax.Expr) -> tuple[relax.Expr, relax.Expr]:
    """Return (log(sigmoid(x)), a buffer that our backward op does not need)."""
    y = ops.call("amp_ir.log_sigmoid", x)
    return y, ops.full(ops.result[1].shape, 0, dtype_of(x))


@converts(aten.log_sigmoid.default)
def log_sigmoid(ops: Emitter, x: relax.Expr) -> relax.Expr:
    """Return log(sigmoid(x))."""
    return gradient(ops, "amp_ir.log_sigmoid", x)


@converts(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(
    ops: Emitter, grad: relax.Expr, x: relax.Expr, _buffer: relax.Expr
) -> relax.Expr:
    """Return the gradient of log_sigmoid."""
    return gradient(ops, "amp_ir.log_sigmoid_backward", grad, x)


@converts(aten.hardtanh_backward.default)
def hardtanh_backward(
    ops: Emitter, grad: relax.Expr, x: relax.Expr, min_value: Scalar, max_value: Scalar
) -> relax.Expr:
    """Return the gradient where x is strictly between the bounds."""
    return gradient(
        ops,
        "amp_ir.hardtanh_backward",
        grad,
        x,
        min_value=float(min_value),
        max_value=float(max_value),
    )


def _gate(ops: Emitter, x: relax.Expr) -> relax.Expr:
    """Return min(max(x + 3, 0), 6) in float32 or wider."""
    dtype = "float64" if dtype_of(x) == "float64" else "float32"
    raised = ops.add(ops.cast(x, dtype), 3.0)
    above = ops.emit(relax.op.maximum(raised, ops.constant(0.0, dtype)))
    return ops.emit(relax.op.minimum(above, ops.constant(6.0, dtype)))


@converts(aten.hardsigmoid.default)
def hardsigmoid(ops: Emitter, x: relax.Expr) -> relax.Expr:
    """Return a line from 0 at -3 to 1 at 3."""
    return ops.cast(ops.divide(_gate(ops, x), 6.0), ops.dtype)


@converts(aten.hardswish.default)
def hardswish(ops: Emitter, x: relax.Expr) -> relax.Expr:
    """Return x * hardsigmoid(x)."""
    gate = _gate(ops, x)
    product = ops.multiply(ops.cast(x, dtype_of(gate)), gate)
    return ops.cast(ops.divide(product, 6.0), ops.dtype)


@converts(aten.softshrink.default)
def softshrink(ops: Emitter, x: relax.Expr, bound: Scalar = 0.5) -> relax.Expr:
    """Return x moved towards 0 by lambda."""
    return gradient(ops, "amp_ir.softshrink", x, bound=float(bound))


@converts(aten.softshrink_backward.default, aten.hardshrink_backward.default)
def shrink_backward(ops: Emitter, grad: relax.Expr, x: relax.Expr, bound: Scalar) -> relax.Expr:
    """Return the gradient where |x| is above lambda."""
    return gradient(ops, "amp_ir.shrink_backward", grad, x, bound=float(bound))


@converts(aten.hardshrink.default)
def hardshrink(ops: Emitter, x: relax.Expr, bound: Scalar = 0.5) -> relax.Expr:
    """Return x where |x| is above lambda, else 0."""
    near = ops.binary(relax.op.less_equal, ops.emit(relax.op.abs(x)), bound)
    return ops.where(near, ops.constant(0.0, dtype_of(x)), x)


@converts(aten._prelu_kernel.default, aten.prelu.default)
def prelu(ops: Emitter, x: relax.Expr, weight: relax.Expr) -> relax.Expr:
    """Return x where positive, else weight * x; the weight broadcasts, or is per channel."""
    rank, extents = len(shape_of(x)), shape_of(weight)
    if len(extents) == 1 and rank > 2:
        weight = ops.reshape(weight, [*extents, *[1] * (rank - 2)])
    positive = ops.binary(relax.op.greater, x, 0)
    return ops.where(positive, x, ops.multiply(weight, x))


@converts(aten._prelu_kernel_backward.default)
def prelu_backward(
    ops: Emitter, grad: relax.Expr, x: relax.Expr, weight: relax.Expr
) -> tuple[relax.Expr, relax.Expr]:
    """Return (dx, dweight before the sum over the axes where the weight broadcasts)."""
    positive = ops.binary(relax.op.greater, x, 0)
    zero = ops.constant(0.0, dtype_of(x))
    return (
        ops.where(positive, grad, ops.multiply(weight, grad)),
        ops.where(positive, zero, ops.multiply(x, grad)),
    )
