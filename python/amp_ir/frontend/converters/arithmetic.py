# SPDX-License-Identifier: Apache-2.0
"""Sums, products, quotients, remainders and powers with PyTorch's promotion."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from tvm import relax

from amp_ir.frontend.converters.emitter import Emitter
from amp_ir.frontend.converters.promotion import (
    LOW_DTYPES,
    Operand,
    dtype_of,
    is_float,
    is_scalar,
)
from amp_ir.frontend.converters.registry import converts

aten = torch.ops.aten


@converts(aten.add.Tensor, aten.add.Scalar)
def add(ops: Emitter, x: Operand, y: Operand, alpha: Operand = 1) -> relax.Expr:
    """x + alpha * y."""
    return _scaled_sum(ops, ops.add, x, y, alpha)


@converts(aten.sub.Tensor, aten.sub.Scalar)
def subtract(ops: Emitter, x: Operand, y: Operand, alpha: Operand = 1) -> relax.Expr:
    """x - alpha * y."""
    return _scaled_sum(ops, ops.subtract, x, y, alpha)


@converts(aten.rsub.Tensor, aten.rsub.Scalar)
def reverse_subtract(ops: Emitter, x: Operand, y: Operand, alpha: Operand = 1) -> relax.Expr:
    """y - alpha * x."""
    return _scaled_sum(ops, ops.subtract, y, x, alpha)


def _scaled_sum(
    ops: Emitter,
    combine: Callable[[Operand, Operand], relax.Expr],
    x: Operand,
    y: Operand,
    alpha: Operand,
) -> relax.Expr:
    """`combine(x, alpha * y)` in the result's dtype; a low dtype is rounded once, at the end."""
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
    """x * y; on bool, "and"."""
    if ops.dtype == "bool":
        return ops.emit(relax.op.logical_and(ops.cast(x, "bool"), ops.cast(y, "bool")))
    return ops.multiply(x, y)


@converts(aten.div.Tensor, aten.div.Scalar)
def divide(ops: Emitter, x: Operand, y: Operand) -> relax.Expr:
    """x / y."""
    return ops.divide(x, y)


@converts(aten.div.Tensor_mode, aten.div.Scalar_mode)
def divide_rounded(
    ops: Emitter, x: Operand, y: Operand, *, rounding_mode: str | None = None
) -> relax.Expr:
    """x / y, rounded as `rounding_mode` says: not at all, towards zero or down."""
    if rounding_mode is None:
        return ops.divide(x, y)
    dtype = ops.dtype
    x, y = ops.cast(x, dtype), ops.cast(y, dtype)
    if is_float(dtype):
        return _divide_floats(ops, x, y, floor=rounding_mode == "floor")
    if rounding_mode == "floor":
        return ops.emit(relax.op.floor_divide(x, y))
    # floor(|x| / |y|) with the sign of x / y, since Relax's floor_divide is the one whose
    # rounding of negative integers is fixed.
    magnitude = ops.emit(
        relax.op.floor_divide(ops.emit(relax.op.abs(x)), ops.emit(relax.op.abs(y)))
    )
    sign = ops.multiply(ops.emit(relax.op.sign(x)), ops.emit(relax.op.sign(y)))
    return ops.multiply(magnitude, sign)


@converts(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(ops: Emitter, x: Operand, y: Operand) -> relax.Expr:
    """The largest integer not above x / y."""
    return divide_rounded(ops, x, y, rounding_mode="floor")


def _divide_floats(ops: Emitter, x: relax.Expr, y: relax.Expr, *, floor: bool) -> relax.Expr:
    if not floor:
        return ops.emit(relax.op.trunc(ops.divide(x, y)))
    # x - remainder is a multiple of y up to rounding, so rounding the quotient is safe where
    # floor(x / y) is not (1.0 // 0.1 is 9). Source: div_floor_floating in c10/util/generic_math.h.
    quotient = ops.divide(ops.subtract(x, _floor_remainder(ops, x, y)), y)
    zero = ops.constant(0.0, dtype_of(y))
    by_zero = ops.emit(relax.op.equal(y, zero))
    return ops.where(by_zero, ops.divide(x, y), ops.emit(relax.op.round(quotient)))


def _signed_remainder(ops: Emitter, x: relax.Expr, y: relax.Expr) -> relax.Expr:
    """The remainder with the sign of x.

    Of absolute values, since there floor and truncating division agree: Relax's `mod` is the
    truncating one in some places and the floor one in others.
    """
    size = ops.emit(relax.op.mod(ops.emit(relax.op.abs(x)), ops.emit(relax.op.abs(y))))
    negative = ops.emit(relax.op.less(x, ops.constant(0, dtype_of(x))))
    return ops.where(negative, ops.emit(relax.op.negative(size)), size)


def _floor_remainder(ops: Emitter, x: relax.Expr, y: relax.Expr) -> relax.Expr:
    """The remainder with the sign of y."""
    zero = ops.constant(0, dtype_of(x))
    remainder = _signed_remainder(ops, x, y)
    # Opposite signs: their product could underflow, so compare with zero both ways.
    above = ops.emit(
        relax.op.logical_and(
            ops.emit(relax.op.greater(remainder, zero)), ops.emit(relax.op.less(y, zero))
        )
    )
    below = ops.emit(
        relax.op.logical_and(
            ops.emit(relax.op.less(remainder, zero)), ops.emit(relax.op.greater(y, zero))
        )
    )
    wrong_sign = ops.emit(relax.op.logical_or(above, below))
    return ops.where(wrong_sign, ops.add(remainder, y), remainder)


@converts(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(ops: Emitter, x: Operand, y: Operand) -> relax.Expr:
    """x modulo y, with the sign of y."""
    dtype = ops.dtype
    return _floor_remainder(ops, ops.cast(x, dtype), ops.cast(y, dtype))


@converts(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(ops: Emitter, x: Operand, y: Operand) -> relax.Expr:
    """x modulo y, with the sign of x."""
    dtype = ops.dtype
    return _signed_remainder(ops, ops.cast(x, dtype), ops.cast(y, dtype))


@converts(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def power(ops: Emitter, x: Operand, exponent: Operand) -> relax.Expr:
    """x ** exponent, element by element."""
    return ops.binary(relax.op.power, x, exponent)


@converts(aten.pow.Tensor_Scalar)
def power_scalar(ops: Emitter, x: relax.Expr, exponent: Operand) -> relax.Expr:
    """x ** exponent, as products and roots for the exponents where PyTorch does so too."""
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
    if exponent in (0.5, -0.5):
        return ops.emit(relax.op.sqrt(x) if exponent > 0 else relax.op.rsqrt(x))
    if exponent in (-1, -2):
        return ops.divide(1.0, x if exponent == -1 else ops.multiply(x, x))
    return ops.emit(relax.op.power(x, ops.constant(exponent, ops.dtype)))


@converts(aten.square.default)
def square(ops: Emitter, x: relax.Expr) -> relax.Expr:
    """x * x."""
    return ops.multiply(x, x)


@converts(aten.reciprocal.default)
def reciprocal(ops: Emitter, x: relax.Expr) -> relax.Expr:
    """1 / x."""
    return ops.divide(1.0, ops.cast(x, ops.dtype))


@converts(aten.log2.default)
def log2(ops: Emitter, x: relax.Expr) -> relax.Expr:
    """The logarithm to base 2."""
    return _scaled_log(ops, x, 1 / math.log(2))


@converts(aten.log10.default)
def log10(ops: Emitter, x: relax.Expr) -> relax.Expr:
    """The logarithm to base 10."""
    return _scaled_log(ops, x, 1 / math.log(10))


def _scaled_log(ops: Emitter, x: relax.Expr, scale: float) -> relax.Expr:
    return ops.multiply(ops.emit(relax.op.log(ops.cast(x, ops.dtype))), scale)


@converts(aten.exp2.default)
def exp2(ops: Emitter, x: relax.Expr) -> relax.Expr:
    """2 to the power x."""
    return ops.binary(relax.op.power, ops.constant(2.0, ops.dtype), ops.cast(x, ops.dtype))


@converts(aten.hypot.default)
def hypot(ops: Emitter, x: relax.Expr, y: relax.Expr) -> relax.Expr:
    """The length of (x, y), as the longer side times sqrt(1 + ratio ** 2): nothing overflows."""
    sides = [ops.emit(relax.op.abs(ops.cast(one, ops.dtype))) for one in (x, y)]
    longer = ops.emit(relax.op.maximum(*sides))
    shorter = ops.emit(relax.op.minimum(*sides))
    is_point = ops.binary(relax.op.equal, longer, 0)
    ratio = ops.where(is_point, 0.0, ops.divide(shorter, longer))
    root = ops.emit(relax.op.sqrt(ops.add(ops.multiply(ratio, ratio), 1.0)))
    return ops.multiply(longer, root)


@converts(aten.atan2.default)
def atan2(ops: Emitter, y: relax.Expr, x: relax.Expr) -> relax.Expr:
    """The angle of (x, y), by the smaller ratio of the two: no quotient overflows.

    (0, 0) and (0, -0) have the angle 0.
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
    is_left = ops.binary(relax.op.less, x, 0)
    angle = ops.where(is_left, ops.subtract(math.pi, angle), angle)
    return ops.where(ops.binary(relax.op.less, y, 0), ops.emit(relax.op.negative(angle)), angle)
