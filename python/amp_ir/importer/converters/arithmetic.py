# SPDX-License-Identifier: Apache-2.0
"""Addition, multiplication, division, remainder and power with PyTorch's promotion."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from tvm import relax

from amp_ir.importer.converters.emitter import Emitter
from amp_ir.importer.converters.promotion import LOW_DTYPES, Operand, is_float, is_scalar
from amp_ir.importer.converters.registry import converts

aten = torch.ops.aten


@converts(aten.add.Tensor, aten.add.Scalar)
def add(ops: Emitter, x: Operand, y: Operand, alpha: Operand = 1) -> relax.Expr:
    """Return x + alpha * y."""
    return _scaled_sum(ops, ops.add, x, y, alpha)


@converts(aten.sub.Tensor, aten.sub.Scalar)
def subtract(ops: Emitter, x: Operand, y: Operand, alpha: Operand = 1) -> relax.Expr:
    """Return x - alpha * y."""
    return _scaled_sum(ops, ops.subtract, x, y, alpha)


@converts(aten.rsub.Tensor, aten.rsub.Scalar)
def reverse_subtract(ops: Emitter, x: Operand, y: Operand, alpha: Operand = 1) -> relax.Expr:
    """Return y - alpha * x."""
    return _scaled_sum(ops, ops.subtract, y, x, alpha)


def _scaled_sum(
    ops: Emitter,
    combine: Callable[[Operand, Operand], relax.Expr],
    x: Operand,
    y: Operand,
    alpha: Operand,
) -> relax.Expr:
    """Return `combine(x, alpha * y)` in the result's dtype; a low dtype rounds once, at the end."""
    dtype = ops.dtype
    if dtype == "bool":
        # PyTorch's bool addition is "or".
        return ops.emit(relax.op.logical_or(ops.cast(x, "bool"), ops.cast(y, "bool")))
    if is_scalar(alpha) and alpha == 1:
        return ops.cast(combine(x, y), dtype)
    inner = "float32" if dtype in LOW_DTYPES else dtype
    product = ops.multiply(ops.cast(y, inner), ops.cast(alpha, inner))
    return ops.cast(combine(ops.cast(x, inner), product), dtype)


@converts(aten.mul.Tensor, aten.mul.Scalar)
def multiply(ops: Emitter, x: Operand, y: Operand) -> relax.Expr:
    """Return x * y; on bool, "and"."""
    if ops.dtype == "bool":
        return ops.emit(relax.op.logical_and(ops.cast(x, "bool"), ops.cast(y, "bool")))
    return ops.multiply(x, y)


@converts(aten.div.Tensor, aten.div.Scalar)
def divide(ops: Emitter, x: Operand, y: Operand) -> relax.Expr:
    """Return x / y."""
    return ops.divide(x, y)


@converts(aten.div.Tensor_mode, aten.div.Scalar_mode)
def divide_rounded(
    ops: Emitter, x: Operand, y: Operand, *, rounding_mode: str | None = None
) -> relax.Expr:
    """Return x / y, rounded as `rounding_mode` says: not at all, towards zero or down."""
    if rounding_mode is None:
        return ops.divide(x, y)
    # A number combined with a tensor of a low dtype is not rounded to that dtype.
    dtype = "float32" if ops.dtype in LOW_DTYPES else ops.dtype
    x, y = ops.cast(x, dtype), ops.cast(y, dtype)
    if rounding_mode == "floor":
        return ops.cast(ops.emit(relax.op.floor_divide(x, y)), ops.dtype)
    # Of integers, Relax's own division rounds towards zero.
    if not is_float(ops.dtype):
        return ops.emit(relax.op.divide(x, y))
    return ops.cast(ops.emit(relax.op.trunc(ops.divide(x, y))), ops.dtype)


@converts(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(ops: Emitter, x: Operand, y: Operand) -> relax.Expr:
    """Return the largest integer not above x / y."""
    return divide_rounded(ops, x, y, rounding_mode="floor")


@converts(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(ops: Emitter, x: Operand, y: Operand) -> relax.Expr:
    """Return x modulo y, with the sign of y."""
    dtype = ops.dtype
    return ops.emit(relax.op.floor_mod(ops.cast(x, dtype), ops.cast(y, dtype)))


@converts(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(ops: Emitter, x: Operand, y: Operand) -> relax.Expr:
    """Return x modulo y, with the sign of x."""
    dtype = ops.dtype
    return ops.emit(relax.op.mod(ops.cast(x, dtype), ops.cast(y, dtype)))


@converts(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def power(ops: Emitter, x: Operand, exponent: Operand) -> relax.Expr:
    """Return x ** exponent, element by element."""
    return ops.binary(relax.op.power, x, exponent)


@converts(aten.pow.Tensor_Scalar)
def power_scalar(ops: Emitter, x: relax.Expr, exponent: Operand) -> relax.Expr:
    """Return x ** exponent, as multiplications and roots for the exponents where PyTorch does."""
    x = ops.cast(x, ops.dtype)
    if not is_scalar(exponent):
        return ops.emit(relax.op.power(x, ops.cast(exponent, ops.dtype)))
    if exponent == 0:
        return ops.full(ops.shape, 1, ops.dtype)
    if exponent == 1:
        return x
    if exponent in (2, 3):
        square = ops.multiply(x, x)
        return square if exponent == 2 else ops.multiply(square, x)
    # PyTorch's float16 uses no roots here: -inf to the power 0.5 is inf.
    if exponent in (0.5, -0.5) and ops.dtype != "float16":
        return ops.emit(relax.op.sqrt(x) if exponent > 0 else relax.op.rsqrt(x))
    if exponent == -1:
        return ops.divide(1.0, x)
    if exponent == -2:
        # Not x * x, which the step may have too: in float16 the square of 1000 is infinite.
        wide = ops.cast(x, "float64" if ops.dtype == "float64" else "float32")
        return ops.cast(ops.divide(1.0, ops.multiply(wide, wide)), ops.dtype)
    return ops.emit(relax.op.power(x, ops.constant(exponent, ops.dtype)))


@converts(aten.square.default)
def square(ops: Emitter, x: relax.Expr) -> relax.Expr:
    """Return x * x."""
    return ops.multiply(x, x)


@converts(aten.reciprocal.default)
def reciprocal(ops: Emitter, x: relax.Expr) -> relax.Expr:
    """Return 1 / x."""
    return ops.divide(1.0, ops.cast(x, ops.dtype))


@converts(aten.log2.default)
def log2(ops: Emitter, x: relax.Expr) -> relax.Expr:
    """Return the logarithm to base 2."""
    return _scaled_log(ops, x, 1 / math.log(2))


@converts(aten.log10.default)
def log10(ops: Emitter, x: relax.Expr) -> relax.Expr:
    """Return the logarithm to base 10."""
    return _scaled_log(ops, x, 1 / math.log(10))


def _scaled_log(ops: Emitter, x: relax.Expr, scale: float) -> relax.Expr:
    return ops.multiply(ops.emit(relax.op.log(ops.cast(x, ops.dtype))), scale)


@converts(aten.exp2.default)
def exp2(ops: Emitter, x: relax.Expr) -> relax.Expr:
    """Return 2 to the power x."""
    return ops.binary(relax.op.power, ops.constant(2.0, ops.dtype), ops.cast(x, ops.dtype))


@converts(aten.hypot.default)
def hypot(ops: Emitter, x: relax.Expr, y: relax.Expr) -> relax.Expr:
    """Return the length of (x, y), as the longer side times sqrt(1 + ratio ** 2): no overflow.

    The result is infinite where either side is, whatever the other one is.
    """
    sides = [ops.emit(relax.op.abs(ops.cast(one, ops.dtype))) for one in (x, y)]
    longer = ops.emit(relax.op.maximum(*sides))
    shorter = ops.emit(relax.op.minimum(*sides))
    is_point = ops.binary(relax.op.equal, longer, 0)
    ratio = ops.where(is_point, 0.0, ops.divide(shorter, longer))
    root = ops.emit(relax.op.sqrt(ops.add(ops.multiply(ratio, ratio), 1.0)))
    endless = [ops.emit(relax.op.isinf(one)) for one in sides]
    is_endless = ops.emit(relax.op.logical_or(*endless))
    return ops.where(is_endless, ops.constant(math.inf, ops.dtype), ops.multiply(longer, root))


@converts(aten.atan2.default)
def atan2(ops: Emitter, y: relax.Expr, x: relax.Expr) -> relax.Expr:
    """Return the angle of (x, y), by the smaller ratio of the two: no quotient overflows.

    Zeros have the sides of their signs: (-0, 0) has the angle pi, (-0, -0) has -pi.
    """
    y, x = (ops.cast(one, ops.dtype) for one in (y, x))
    sides = [ops.emit(relax.op.abs(one)) for one in (y, x)]
    is_steep = ops.binary(relax.op.greater, *sides)
    longer = ops.emit(relax.op.maximum(*sides))
    shorter = ops.emit(relax.op.minimum(*sides))
    # Two infinite sides are as long as each other.
    is_even = ops.binary(relax.op.equal, shorter, longer)
    is_point = ops.binary(relax.op.equal, longer, 0)
    ratio = ops.where(is_even, 1.0, ops.divide(shorter, longer))
    angle = ops.emit(relax.op.atan(ops.where(is_point, 0.0, ratio)))
    angle = ops.where(is_steep, ops.subtract(math.pi / 2, angle), angle)
    angle = ops.where(_is_negative(ops, x), ops.subtract(math.pi, angle), angle)
    return ops.where(_is_negative(ops, y), ops.emit(relax.op.negative(angle)), angle)


def _is_negative(ops: Emitter, x: relax.Expr) -> relax.Expr:
    """Return whether x is below 0, or -0, whose reciprocal is."""
    below = ops.binary(relax.op.less, x, 0)
    return ops.emit(relax.op.logical_or(below, ops.binary(relax.op.less, ops.divide(1.0, x), 0)))
