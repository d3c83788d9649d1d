# SPDX-License-Identifier: Apache-2.0
"""Rounded quotients and remainders of kernel elements as in PyTorch, for integers and floats.

No integer division traps: by 0 the quotient and the remainder are 0 (another pass checks whether a
step may divide by 0), and the lowest integer over -1 wraps around.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from amp_ir.loops import integers
from amp_ir.loops.body_context import let
from amp_ir.loops.elements import constant, difference, dtype_of, quotient, select, signed_zero


def truncated(a: Any, b: Any) -> Any:
    """Return a / b rounded towards 0."""
    if not integers.is_integer(dtype_of(a)):
        return tirx.trunc(quotient(a, b))
    a, b = let(a), let(b)
    return let(_safe_quotient(a, b))


def remainder(a: Any, b: Any) -> Any:
    """Return the remainder of `truncated`, with the sign of a; exact, also for floats."""
    a, b = let(a), let(b)
    if integers.is_integer(dtype_of(a)):
        return let(_safe_remainder(a, b))
    return let(tirx.Mod(a, b))


def floor_remainder(a: Any, b: Any) -> Any:
    """Return the remainder of `floored`, with the sign of b."""
    a, b = let(a), let(b)
    rest = remainder(a, b)
    if not integers.is_integer(dtype_of(a)):
        return select(_differ_in_sign(rest, b), rest + b, rest)
    if not integers.is_signed(dtype_of(a)):
        return rest
    return select(_differ_in_sign(rest, b), integers.add(rest, b), rest)


def floored(a: Any, b: Any) -> Any:
    """Return a / b rounded down."""
    a, b = let(a), let(b)
    if not integers.is_integer(dtype_of(a)):
        return _floored_floats(a, b)
    if not integers.is_signed(dtype_of(a)):
        return truncated(a, b)
    whole, below = truncated(a, b), _differ_in_sign(_safe_remainder(a, b), b)
    return select(below, whole - constant(1, dtype_of(a)), whole)


def _floored_floats(a: Any, b: Any) -> Any:
    """Return floor(a / b) from the remainder; floor(a / b) itself may be wrong: 1.0 // 0.1 is 9.

    Source: div_floor_floating in c10/util/generic_math.h.
    """
    zero, one, half = (constant(number, dtype_of(a)) for number in (0.0, 1.0, 0.5))
    by_quotient = let(quotient(a, b))
    rest = remainder(a, b)
    whole = let(quotient(difference(a, rest), b))
    whole = let(select(_differ_in_sign(rest, b), difference(whole, one), whole))
    floor = let(tirx.floor(whole))
    floor = select(difference(whole, floor) > half, floor + one, floor)
    result = select(tirx.EQ(whole, zero), signed_zero(by_quotient), floor)
    return select(tirx.EQ(b, zero), by_quotient, result)


def _differ_in_sign(rest: Any, b: Any) -> Any:
    zero = constant(0, dtype_of(b))
    return tirx.any(tirx.all(rest > zero, b < zero), tirx.all(rest < zero, b > zero))


def _safe_quotient(a: Any, b: Any) -> Any:
    zero = constant(0, dtype_of(a))
    result = tirx.truncdiv(a, _safe_divisor(b))
    if integers.is_signed(dtype_of(a)):
        result = select(tirx.EQ(b, constant(-1, dtype_of(a))), integers.negative(a), result)
    return select(tirx.EQ(b, zero), zero, result)


def _safe_remainder(a: Any, b: Any) -> Any:
    # By 1, -1 and 0 nothing is left.
    return tirx.truncmod(a, _safe_divisor(b))


def _safe_divisor(b: Any) -> Any:
    """Replace a divisor of 0 by 1, and one of -1 too, whose quotient may overflow."""
    zero, one = constant(0, dtype_of(b)), constant(1, dtype_of(b))
    by_nothing = tirx.EQ(b, zero)
    if integers.is_signed(dtype_of(b)):
        by_nothing = tirx.any(by_nothing, tirx.EQ(b, constant(-1, dtype_of(b))))
    return let(select(by_nothing, one, b))
