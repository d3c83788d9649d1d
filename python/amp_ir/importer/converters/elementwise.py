# SPDX-License-Identifier: Apache-2.0
"""Elementwise comparisons, logic and elementary functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from tvm import relax

from amp_ir.importer.converters.emitter import Emitter, dtype_name
from amp_ir.importer.converters.promotion import (
    Operand,
    dtype_of,
    is_float,
    promoted_dtype,
    shape_of,
)
from amp_ir.importer.converters.registry import Converter, converts

aten = torch.ops.aten


RelaxUnary: TypeAlias = Callable[[relax.Expr], relax.Expr]


RelaxBinary: TypeAlias = Callable[[relax.Expr, relax.Expr], relax.Expr]


# Functions of a real number: an integer argument is converted to the result's dtype first.
REAL_FUNCTIONS: dict[torch._ops.OpOverload, RelaxUnary] = {
    aten.exp.default: relax.op.exp,
    aten.log.default: relax.op.log,
    aten.sqrt.default: relax.op.sqrt,
    aten.rsqrt.default: relax.op.rsqrt,
    aten.sin.default: relax.op.sin,
    aten.cos.default: relax.op.cos,
    aten.tan.default: relax.op.tan,
    aten.asin.default: relax.op.asin,
    aten.acos.default: relax.op.acos,
    aten.atan.default: relax.op.atan,
    aten.sinh.default: relax.op.sinh,
    aten.cosh.default: relax.op.cosh,
    aten.asinh.default: relax.op.asinh,
    aten.acosh.default: relax.op.acosh,
    aten.atanh.default: relax.op.atanh,
    aten.tanh.default: relax.op.tanh,
    aten.sigmoid.default: relax.op.sigmoid,
    aten.erf.default: relax.op.erf,
}


# Functions of the same name in the dialect, which Relax lacks.
DIALECT_FUNCTIONS: dict[torch._ops.OpOverload, str] = {
    aten.log1p.default: "amp_ir.log1p",
    aten.expm1.default: "amp_ir.expm1",
}


# Functions that leave an integer as it is.
ROUNDINGS: dict[torch._ops.OpOverload, RelaxUnary] = {
    aten.floor.default: relax.op.floor,
    aten.ceil.default: relax.op.ceil,
    aten.round.default: relax.op.round,
    aten.trunc.default: relax.op.trunc,
}


SIGNED: dict[torch._ops.OpOverload, RelaxUnary] = {
    aten.abs.default: relax.op.abs,
    aten.neg.default: relax.op.negative,
    aten.sign.default: relax.op.sign,
}


COMPARISONS: dict[torch._ops.OpOverloadPacket, RelaxBinary] = {
    aten.eq: relax.op.equal,
    aten.ne: relax.op.not_equal,
    aten.lt: relax.op.less,
    aten.le: relax.op.less_equal,
    aten.gt: relax.op.greater,
    aten.ge: relax.op.greater_equal,
}


LOGICAL: dict[torch._ops.OpOverload, RelaxBinary] = {
    aten.logical_and.default: relax.op.logical_and,
    aten.logical_or.default: relax.op.logical_or,
    aten.logical_xor.default: relax.op.logical_xor,
}


# On bool a bitwise op is the logical one.
BITWISE: dict[torch._ops.OpOverloadPacket, tuple[RelaxBinary, RelaxBinary]] = {
    aten.bitwise_and: (relax.op.bitwise_and, relax.op.logical_and),
    aten.bitwise_or: (relax.op.bitwise_or, relax.op.logical_or),
    aten.bitwise_xor: (relax.op.bitwise_xor, relax.op.logical_xor),
}


def _real_function(op: RelaxUnary) -> Converter:
    def convert(ops: Emitter, x: relax.Expr) -> relax.Expr:
        return ops.emit(op(ops.cast(x, ops.dtype)))

    return convert


def _dialect_function(name: str) -> Converter:
    def convert(ops: Emitter, x: relax.Expr) -> relax.Expr:
        result: relax.Expr = ops.call(name, ops.cast(x, ops.dtype))
        return result

    return convert


def _rounding(op: RelaxUnary) -> Converter:
    def convert(ops: Emitter, x: relax.Expr) -> relax.Expr:
        return ops.emit(op(x)) if is_float(dtype_of(x)) else x

    return convert


def _signed(op: RelaxUnary) -> Converter:
    def convert(ops: Emitter, x: relax.Expr) -> relax.Expr:
        return x if dtype_of(x) == "bool" else ops.emit(op(x))

    return convert


def _comparison(op: RelaxBinary) -> Converter:
    def convert(ops: Emitter, x: Operand, y: Operand) -> relax.Expr:
        if promoted_dtype(x, y) == "bool":
            # Loops compare numbers; bool has no order in TVM.
            x, y = ops.cast(x, "int8"), ops.cast(y, "int8")
        return ops.binary(op, x, y)

    return convert


def _logical(op: RelaxBinary) -> Converter:
    def convert(ops: Emitter, x: relax.Expr, y: relax.Expr) -> relax.Expr:
        return ops.emit(op(ops.cast(x, "bool"), ops.cast(y, "bool")))

    return convert


def _bitwise(on_integers: RelaxBinary, on_bool: RelaxBinary) -> Converter:
    def convert(ops: Emitter, x: Operand, y: Operand) -> relax.Expr:
        return ops.binary(on_bool if promoted_dtype(x, y) == "bool" else on_integers, x, y)

    return convert


def _register_tables() -> None:
    for overload, op in REAL_FUNCTIONS.items():
        converts(overload)(_real_function(op))
    for overload, name in DIALECT_FUNCTIONS.items():
        converts(overload)(_dialect_function(name))
    for overload, op in ROUNDINGS.items():
        converts(overload)(_rounding(op))
    for overload, op in SIGNED.items():
        converts(overload)(_signed(op))
    for overload, pairwise in LOGICAL.items():
        converts(overload)(_logical(pairwise))
    for packet, comparison in COMPARISONS.items():
        converts(packet.Tensor, packet.Scalar)(_comparison(comparison))
    for packet, (on_integers, on_bool) in BITWISE.items():
        converts(packet.Tensor, packet.Scalar)(_bitwise(on_integers, on_bool))


_register_tables()


@converts(aten.maximum.default)
def maximum(ops: Emitter, x: relax.Expr, y: relax.Expr) -> relax.Expr:
    """Return the larger of two."""
    return _extremum(ops, relax.op.maximum, x, y)


@converts(aten.minimum.default)
def minimum(ops: Emitter, x: relax.Expr, y: relax.Expr) -> relax.Expr:
    """Return the smaller of two."""
    return _extremum(ops, relax.op.minimum, x, y)


@converts(aten.fmax.default)
def fmax(ops: Emitter, x: relax.Expr, y: relax.Expr) -> relax.Expr:
    """Return the larger of two; of a NaN and a number, the number."""
    return _number_of(ops, x, y, _extremum(ops, relax.op.maximum, y, x))


@converts(aten.fmin.default)
def fmin(ops: Emitter, x: relax.Expr, y: relax.Expr) -> relax.Expr:
    """Return the smaller of two; of a NaN and a number, the number."""
    return _number_of(ops, x, y, _extremum(ops, relax.op.minimum, y, x))


def _number_of(ops: Emitter, x: relax.Expr, y: relax.Expr, both: relax.Expr) -> relax.Expr:
    """Return `both` where x and y are numbers, else the one that is a number."""
    if not is_float(dtype_of(both)):
        return both
    x, y = ops.cast(x, dtype_of(both)), ops.cast(y, dtype_of(both))
    no_y = ops.where(ops.emit(relax.op.isnan(y)), x, both)
    return ops.where(ops.emit(relax.op.isnan(x)), y, no_y)


def _extremum(ops: Emitter, op: RelaxBinary, x: relax.Expr, y: relax.Expr) -> relax.Expr:
    if promoted_dtype(x, y) == "bool":
        return ops.cast(ops.emit(op(ops.cast(x, "int8"), ops.cast(y, "int8"))), "bool")
    return ops.binary(op, x, y)


@converts(
    aten.clamp.default,
    aten.clamp.Tensor,
    aten.clamp_min.default,
    aten.clamp_min.Tensor,
)
def clamp(
    ops: Emitter, x: relax.Expr, min: Operand | None = None, max: Operand | None = None
) -> relax.Expr:
    """Return x clamped between min and max; where min > max the result is max."""
    if ops.dtype == "bool":
        # TVM does not order bool; True is the larger.
        held = _clamped(ops, x, min, max, "int8")
        return ops.cast(held, "bool")
    return _clamped(ops, x, min, max, ops.dtype)


def _clamped(
    ops: Emitter, x: relax.Expr, min: Operand | None, max: Operand | None, dtype: str
) -> relax.Expr:
    value = ops.cast(x, dtype)
    if min is not None:
        value = ops.emit(relax.op.maximum(value, ops.cast(min, dtype)))
    if max is not None:
        value = ops.emit(relax.op.minimum(value, ops.cast(max, dtype)))
    return value


@converts(aten.hardtanh.default)
def hardtanh(ops: Emitter, x: relax.Expr, min: Operand = -1, max: Operand = 1) -> relax.Expr:
    """Return x clamped between min and max."""
    return clamp(ops, x, min, max)


@converts(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(ops: Emitter, x: relax.Expr, max: Operand) -> relax.Expr:
    """Return the smaller of x and max."""
    return clamp(ops, x, None, max)


@converts(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def where(ops: Emitter, condition: relax.Expr, x: Operand, y: Operand) -> relax.Expr:
    """Return x where the condition holds, else y."""
    return ops.broadcast(ops.where(condition, x, y), ops.shape)


@converts(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(ops: Emitter, x: relax.Expr, mask: relax.Expr, value: Operand) -> relax.Expr:
    """Return x with `value` where the mask holds."""
    return ops.broadcast(ops.where(mask, ops.cast(value, dtype_of(x)), x), ops.shape)


@converts(aten.logical_not.default)
def logical_not(ops: Emitter, x: relax.Expr) -> relax.Expr:
    """Return whether x is zero."""
    return ops.emit(relax.op.logical_not(ops.cast(x, "bool")))


@converts(aten.bitwise_not.default)
def bitwise_not(ops: Emitter, x: relax.Expr) -> relax.Expr:
    """Flip every bit; on bool, "not"."""
    return ops.emit(relax.op.logical_not(x) if dtype_of(x) == "bool" else relax.op.bitwise_not(x))


@converts(
    aten.bitwise_left_shift.Tensor,
    aten.bitwise_left_shift.Tensor_Scalar,
    aten.__lshift__.Tensor,
    aten.__lshift__.Scalar,
)
def left_shift(ops: Emitter, x: relax.Expr, y: Operand) -> relax.Expr:
    """Return x * 2 ** y."""
    return ops.binary(relax.op.left_shift, x, y)


@converts(
    aten.bitwise_right_shift.Tensor,
    aten.bitwise_right_shift.Tensor_Scalar,
    aten.__rshift__.Tensor,
    aten.__rshift__.Scalar,
)
def right_shift(ops: Emitter, x: relax.Expr, y: Operand) -> relax.Expr:
    """Return x / 2 ** y, rounded down."""
    return ops.binary(relax.op.right_shift, x, y)


@converts(aten.isnan.default)
def isnan(ops: Emitter, x: relax.Expr) -> relax.Expr:
    """Return whether x is not a number."""
    return _classify(ops, relax.op.isnan, x, of_integer=False)


@converts(aten.isinf.default)
def isinf(ops: Emitter, x: relax.Expr) -> relax.Expr:
    """Return whether x is an infinity."""
    return _classify(ops, relax.op.isinf, x, of_integer=False)


@converts(aten.isfinite.default)
def isfinite(ops: Emitter, x: relax.Expr) -> relax.Expr:
    """Return whether x is neither an infinity nor NaN."""
    return _classify(ops, relax.op.isfinite, x, of_integer=True)


def _classify(ops: Emitter, op: RelaxUnary, x: relax.Expr, *, of_integer: bool) -> relax.Expr:
    if not is_float(dtype_of(x)):
        return ops.full(shape_of(x), of_integer, "bool")
    return ops.emit(op(x))


@converts(
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten.contiguous.default,
)
def same(
    ops: Emitter, x: relax.Expr, *, memory_format: torch.memory_format | None = None
) -> relax.Expr:
    """Return x: values have no layout or identity in the IR."""
    return x


@converts(aten._to_copy.default)
def to_copy(
    ops: Emitter,
    x: relax.Expr,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> relax.Expr:
    """Cast because the user asked for it (with `relax.astype`, which no pass removes)."""
    return x if dtype is None else ops.cast(x, dtype_name(dtype))


@converts(aten.copy.default)
def copy(ops: Emitter, x: relax.Expr, source: Operand, non_blocking: bool = False) -> relax.Expr:
    """Return the source in the dtype and shape of x."""
    return ops.broadcast(ops.cast(source, dtype_of(x)), shape_of(x))
