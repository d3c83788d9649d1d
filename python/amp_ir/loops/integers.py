# SPDX-License-Identifier: Apache-2.0
"""Integer arithmetic of kernel elements as in PyTorch: it wraps around, and nothing traps.

TVM assumes that integers do not overflow: its simplifier relies on it, and TVM marks arithmetic of
32 bits and more nsw or nuw for LLVM, also of unsigned integers: `a + 1 > a` is true there and `0 -
a` is 0. So sums are computed in a type that holds them and truncated; LLVM folds that into one
instruction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

from amp_ir.loops.body_context import let
from amp_ir.loops.elements import constant, dtype_of


def is_signed(dtype: str) -> bool:
    """Return whether a dtype is a signed integer."""
    return dtype.startswith("int")


def is_integer(dtype: str) -> bool:
    """Return whether a dtype is an integer; bool is not."""
    return dtype.startswith(("int", "uint"))


def bits_of(dtype: str) -> int:
    """Return the width of an integer dtype in bits."""
    return int(dtype.removeprefix("u").removeprefix("int"))


def add(a: Any, b: Any) -> Any:
    """Return a + b."""
    return _by_halves(tirx.Add, a, b) if _is_widest(a) else _cut_off(tirx.Add, a, b)


def subtract(a: Any, b: Any) -> Any:
    """Return a - b."""
    return _by_halves(tirx.Sub, a, b) if _is_widest(a) else _cut_off(tirx.Sub, a, b)


def multiply(a: Any, b: Any) -> Any:
    """Return a * b."""
    if not _is_widest(a):
        return _cut_off(tirx.Mul, a, b)
    (low, high), (other_low, other_high) = _halves(a), _halves(b)
    across = _low_half(low * other_high) + _low_half(high * other_low)
    # Below 2^64, which a signed product would overflow.
    both_low = tirx.Cast("uint64", low) * tirx.Cast("uint64", other_low)
    return add(tirx.reinterpret("int64", both_low), _up(across))


def _is_widest(x: Any) -> bool:
    return dtype_of(x) == "int64"


def _cut_off(function: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """Compute `function(a, b)` in a type at least twice as wide, and return the low bits."""
    dtype = dtype_of(a)
    bits, unsigned = bits_of(dtype), dtype if dtype.startswith("u") else "u" + dtype
    wide = "int64" if bits == 32 else "int32"
    whole = function(tirx.Cast(wide, a), tirx.Cast(wide, b))
    low = tirx.Cast(unsigned, tirx.bitwise_and(whole, tirx.const((1 << bits) - 1, wide)))
    return low if dtype == unsigned else tirx.reinterpret(dtype, low)


def _by_halves(function: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """Add or subtract 64-bit integers as two halves of 32 bits, with carry or borrow."""
    (low, high), (other_low, other_high) = _halves(a), _halves(b)
    low = let(function(low, other_low))
    high = function(high, other_high) + _down(low)
    return tirx.bitwise_or(_up(high), _low_half(low))


def _halves(x: Any) -> tuple[Any, Any]:
    x = let(x)
    return let(_low_half(x)), let(_down(x))


def _up(x: Any) -> Any:
    """Return x * 2^32.

    In two shifts, as below: TVM makes what indexes a buffer 32 bits wide, where the numbers fit,
    and has no shift by 32 of these. Two by 16 give the same there.
    """
    return tirx.shift_left(tirx.shift_left(x, _word(16)), _word(16))


def _down(x: Any) -> Any:
    """Return x / 2^32, rounded down."""
    return tirx.shift_right(tirx.shift_right(x, _word(16)), _word(16))


def _low_half(x: Any) -> Any:
    return tirx.bitwise_and(x, _word(0xFFFFFFFF))


def _word(number: int) -> Any:
    return tirx.const(number, "int64")


def negative(x: Any) -> Any:
    """Return -x; the lowest integer is its own negative."""
    return subtract(constant(0, dtype_of(x)), x)


def absolute(x: Any) -> Any:
    """Return |x|; the lowest integer stays as it is."""
    if not is_signed(dtype_of(x)):
        return x
    x = let(x)
    return tirx.Select(x < constant(0, dtype_of(x)), negative(x), x)


def left_shift(x: Any, y: Any) -> Any:
    """Return x * 2^y; 0 where y is negative or not below the width."""
    x, y = let(x), let(y)
    shifted = tirx.shift_left(x, _within_width(y))
    return tirx.Select(_is_within_width(y), shifted, constant(0, dtype_of(x)))


def right_shift(x: Any, y: Any) -> Any:
    """Return x / 2^y, rounded down; a negative y counts as one that is not below the width."""
    x, y = let(x), let(y)
    last = constant(bits_of(dtype_of(x)) - 1, dtype_of(x))
    if is_signed(dtype_of(x)):
        return tirx.shift_right(x, tirx.Select(_is_within_width(y), y, last))
    shifted = tirx.shift_right(x, _within_width(y))
    return tirx.Select(_is_within_width(y), shifted, constant(0, dtype_of(x)))


def _is_within_width(y: Any) -> Any:
    width = constant(bits_of(dtype_of(y)), dtype_of(y))
    return tirx.all(y >= constant(0, dtype_of(y)), y < width)


def _within_width(y: Any) -> Any:
    # A shift by the width or more is undefined, even where a select drops it.
    return tirx.bitwise_and(y, constant(bits_of(dtype_of(y)) - 1, dtype_of(y)))


def power(x: Any, y: Any) -> Any:
    """Return x^y by squaring; a negative power is 0, except of 1 and -1."""
    x, y = let(x), let(y)
    dtype = dtype_of(x)
    zero, one = constant(0, dtype), constant(1, dtype)
    result, square, rest = one, x, y
    # Powers of integers by an exponent with more bits are 0, 1 or -1 modulo 2^64 or out of range.
    for _ in range(bits_of(dtype)):
        is_odd = tirx.NE(tirx.bitwise_and(rest, one), zero)
        result = let(tirx.Select(is_odd, multiply(result, square), result))
        square = let(multiply(square, square))
        rest = let(tirx.shift_right(rest, one))
    if not is_signed(dtype):
        return result
    minus = constant(-1, dtype)
    sign = tirx.Select(tirx.EQ(tirx.bitwise_and(y, one), one), minus, one)
    inverse = tirx.Select(tirx.EQ(x, minus), sign, zero)
    inverse = tirx.Select(tirx.EQ(x, one), one, inverse)
    return tirx.Select(y < zero, inverse, result)
