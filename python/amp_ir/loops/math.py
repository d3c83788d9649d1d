# SPDX-License-Identifier: Apache-2.0
"""Scalar functions of kernel elements that the CPU back end can vectorise.

TVM's LLVM output calls libm once per lane for exp, log, tanh and erf; the float32 versions below
are polynomials in plain arithmetic. tests/loops tests the error bounds against float64. float64
arguments use libm: only optimizer scalars are float64. A GPU has instructions for most of it, and
its own functions (`device_function`), which PyTorch calls too, take a third of the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm import tirx

from amp_ir.loops.body_context import let
from amp_ir.loops.elements import (
    absolute,
    cast,
    clamp,
    constant,
    device_function,
    device_scaled,
    difference,
    differs,
    dtype_of,
    equals,
    inside,
    isnan,
    larger,
    libm,
    literal,
    maximum,
    minimum,
    optimization_barrier,
    power,
    product,
    quotient,
    relu,
    rounded,
    rsqrt,
    select,
    signed_zero,
    sqrt,
    total,
)

__all__ = [
    "absolute",
    "atanh",
    "bell",
    "cast",
    "clamp",
    "constant",
    "cosh",
    "difference",
    "differs",
    "dtype_of",
    "equals",
    "erf",
    "exp",
    "inside",
    "isnan",
    "larger",
    "libm",
    "literal",
    "log",
    "log1p",
    "maximum",
    "minimum",
    "normal_cdf",
    "optimization_barrier",
    "power",
    "product",
    "quotient",
    "relu",
    "rounded",
    "rsqrt",
    "select",
    "sigmoid",
    "signed_zero",
    "sinh",
    "sqrt",
    "tanh",
    "total",
]

# e^r for |r| <= ln 2 / 2 from the highest power on; the first two terms are exact, the others those
# of the least relative error, 3.1e-9 (Lawson's algorithm).
_EXP_SERIES = (
    0.001381459878757596, 0.008368716575205326, 0.04166838899254799, 0.1666652113199234,
    0.4999999403953552, 1.0, 1.0,
)  # fmt: skip
# e^x is a normal number, 0 or infinite there: the logarithms of 2^-126, half of 2^-149 and 2^128.
_EXP_NORMAL, _EXP_LOW, _EXP_HIGH = -87.33654, -104.0, 88.72283
# Its last bits are those of a whole number that is added to it.
_ROUNDER = 1.5 * 2.0**23


def exp(x: Any, *, halvings: int = 0, least: float = _EXP_LOW) -> Any:
    """Return e^x / 2^`halvings`, where e^x may overflow; relative error below 1.2e-7 in float32.

    Below `least` a CPU's result is 0.
    """
    if dtype_of(x) != "float32":
        return tirx.exp(x) * constant(0.5**halvings, dtype_of(x)) if halvings else tirx.exp(x)
    of_device = device_function("exp", x)
    if of_device is not None and not halvings:
        return of_device
    x = let(x)
    scaled = device_scaled()
    if scaled is not None:
        return _scaled_exp(x, scaled, halvings, least)
    low = constant(least)
    y = let(select(x < low, low, x))
    shifted = let(tirx.reinterpret("int32", _whole(y)))
    n = let(tirx.reinterpret("float32", shifted) - constant(_ROUNDER))
    series = _exp_of_rest(y, n)
    # 2^n is in the exponent's place. A subnormal result is a normal one times 2^-64: no
    # intermediate number is subnormal. Nor is a product rounded to 0, which takes an Intel CPU as
    # long: below all of them the factor itself is 0, as a mask has -inf everywhere.
    is_tiny = y < constant(_EXP_NORMAL + halvings * math.log(2))
    more = tirx.Select(is_tiny, _int(64 - halvings), _int(-halvings))
    power = tirx.shift_left(shifted + more, _int(23))
    result = tirx.reinterpret("float32", tirx.reinterpret("int32", series) + power)
    factor = select(is_tiny, constant(2.0**-64), constant(1.0))
    result = result * select(x < low, constant(0.0), factor)
    # NaN is in no range, and x + inf is NaN for it.
    high = constant(_EXP_HIGH + halvings * math.log(2))
    return select(x < high, result, x + constant(math.inf))


def _scaled_exp(x: Any, scaled: Callable[..., Any], halvings: int, least: float) -> Any:
    """Return the same number with an instruction that scales by 2^n, also to inf or subnormal."""
    # Beyond is inf; NaN stays.
    high = constant(_EXP_HIGH + 1 + halvings * math.log(2))
    y = let(select(x > high, high, x))
    n = let(let(_whole(y)) - constant(_ROUNDER))
    exponent = n - constant(halvings) if halvings else n
    return scaled(_exp_of_rest(y, n), exponent, x < constant(least))


def _whole(y: Any) -> Any:
    """Return y / ln 2, rounded, plus a number so large that it has no bits below 1."""
    return y * constant(1.4426950408889634) + constant(_ROUNDER)


def _exp_of_rest(y: Any, n: Any) -> Any:
    """Return e^r of y = n ln 2 + r, |r| <= ln 2 / 2; ln 2 in two parts (Cody and Waite)."""
    r = let(y - n * constant(0.693359375))
    r = let(r - n * constant(-2.12194440054690583e-4))
    return _polynomial(_EXP_SERIES, r)


def _int(number: int) -> Any:
    return tirx.const(number, "int32")


def log(x: Any) -> Any:
    """Return the natural logarithm; relative error below 2e-7 in float32; -inf at 0, NaN below."""
    if dtype_of(x) != "float32":
        return tirx.log(x)
    of_device = device_function("log", x)
    if of_device is not None:
        return of_device
    x = let(x)
    tiny = let(x < constant(1.17549435e-38))
    scaled = select(tiny, x * constant(2.0**24), x)
    bits = tirx.reinterpret("int32", scaled)
    # m in [sqrt(1/2), sqrt(2)): subtract the bits of sqrt(1/2) so that the exponent rounds there.
    shifted = let(bits - tirx.const(0x3F3504F3, "int32"))
    exponent = tirx.Cast("float32", tirx.shift_right(shifted, tirx.const(23, "int32")))
    exponent = let(exponent - select(tiny, constant(24.0), constant(0.0)))
    mantissa_bits = tirx.bitwise_and(shifted, tirx.const(0x007FFFFF, "int32")) + tirx.const(
        0x3F3504F3, "int32"
    )
    f = let(tirx.reinterpret("float32", mantissa_bits) - constant(1.0))
    # log(1 + f) = 2 atanh(s), s = f / (2 + f) (fdlibm's reduction, series in s^2).
    s = let(f / (constant(2.0) + f))
    z = let(s * s)
    series = constant(2.0 / 9)
    for k in (7, 5, 3):
        series = series * z + constant(2.0 / k)
    half_square = let(constant(0.5) * f * f)
    low = exponent * constant(-2.12194440054690583e-4)
    result = f - (half_square - (s * (half_square + series * z) + low))
    result = exponent * constant(0.693359375) + result
    result = select(tirx.EQ(x, constant(0.0)), constant(-math.inf), result)
    result = select(x < constant(0.0), constant(math.nan), result)
    return select(tirx.any(isnan(x), tirx.EQ(x, constant(math.inf))), x, result)


def log1p(x: Any) -> Any:
    """Return log(1 + x), accurate for small x (Kahan's correction)."""
    if dtype_of(x) != "float32":
        return _extern("log1p")(x)
    x = let(x)
    u = let(constant(1.0) + x)
    corrected = log(u) * (x / difference(u, constant(1.0)))
    is_one = tirx.EQ(u, constant(1.0))
    exact = tirx.any(is_one, tirx.EQ(u, constant(math.inf)))
    return select(exact, select(is_one, x, u), corrected)


def _extern(name: str) -> Any:
    """Call a function of float64 in libm, which is more accurate than TVM's own formulas."""
    return libm(lambda x: tirx.call_pure_extern(dtype_of(x), name, x))


def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent; absolute error below 2e-7 in float32."""
    if dtype_of(x) != "float32":
        return _extern("tanh")(x)
    of_device = device_function("tanh", x)
    if of_device is not None:
        return of_device
    x = let(x)
    magnitude = let(absolute(x))
    z = let(x * x)
    # tanh x = x + x^3 P(x^2) near 0 (Cephes tanhf), 1 - 2 / (e^2x + 1) elsewhere.
    series = constant(-5.70498872745e-3)
    for c in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
        series = series * z + constant(c)
    small = series * z * magnitude + magnitude
    large = constant(1.0) - constant(2.0) / (exp(magnitude + magnitude) + constant(1.0))
    return _with_sign(x, select(magnitude < constant(0.625), small, large))


def _with_sign(x: Any, magnitude: Any) -> Any:
    """Give a non-negative float32 the sign of `x`, also of -0."""
    sign = tirx.bitwise_and(tirx.reinterpret("uint32", x), tirx.const(1 << 31, "uint32"))
    bits = tirx.bitwise_or(tirx.reinterpret("uint32", magnitude), sign)
    return tirx.reinterpret("float32", bits)


def sinh(x: Any) -> Any:
    """Return (e^x - e^-x) / 2; by its series near 0, where that cancels."""
    if dtype_of(x) != "float32":
        return _extern("sinh")(x)
    x = let(x)
    square = let(x * x)
    series = constant(1 / 6) + square * (constant(1 / 120) + square * constant(1 / 5040))
    near = x + x * (square * series)
    # 0 has the sign of x by way of x + x 0.
    return select(absolute(x) < constant(0.5), near, exp(x, halvings=1) - exp(-x, halvings=1))


def cosh(x: Any) -> Any:
    """Return (e^x + e^-x) / 2."""
    if dtype_of(x) != "float32":
        return _extern("cosh")(x)
    x = let(x)
    return exp(x, halvings=1) + exp(-x, halvings=1)


def atanh(x: Any) -> Any:
    """Return log((1 + x) / (1 - x)) / 2."""
    if dtype_of(x) != "float32":
        return _extern("atanh")(x)
    x = let(x)
    size = let(absolute(x))
    ratio = let(constant(2.0) * size / (constant(1.0) - size))
    return let(_with_sign(x, constant(0.5) * log1p(ratio)))


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + e^-x)."""
    one = constant(1.0, dtype_of(x))
    return one / (one + exp(-x))


# There the bell is 2^-120, and the distribution's tail, 1/33 of that, is hardly more than 2^-126.
_BELL_LOW = -120 * math.log(2.0)


def bell(x: Any) -> Any:
    """Return e^(-x^2 / 2); 0 where it is less than 2^-120, which is 7.5e-37.

    There the tail of the normal distribution is soon subnormal, and products with it take an Intel
    CPU a hundred times as long.
    """
    x = let(x)
    return exp(constant(-0.5, dtype_of(x)) * x * x, least=_BELL_LOW)


# The normal distribution's tail below -a times e^(a^2 / 2), for 0 <= a < 15: a quotient of two
# polynomials with a relative error of 5.9e-9, from the highest power on (Lawson's algorithm).
_TAIL_TOP = (
    0.004116307001317305, 0.04063321141724342, 0.183235090743988, 0.43829488320178506,
    0.5000000029529563,
)  # fmt: skip
_TAIL_BOTTOM = (
    0.010317931771757573, 0.10185880373248922, 0.46947050625382464, 1.2025029400800857,
    1.6744747476101853, 1.0,
)  # fmt: skip
# erf(x) / x in x^2, for |x| <= 1: relative error 1.3e-9.
_ERF_SERIES = (
    7.852727021841825e-05, -0.0008009825446431951, 0.005188281640962789, -0.026853784227953887,
    0.1128358433537786, -0.37612625721428594, 1.1283791656892928,
)  # fmt: skip


def normal_cdf(x: Any, bell: Any) -> Any:
    """Return the normal distribution function at x; `bell` is that at x, which users have.

    The tails keep their digits: 1 + erf(x) has none left below -5.
    """
    if dtype_of(x) != "float32":
        half = constant(0.5, dtype_of(x))
        return half * _extern("erfc")(x * constant(-math.sqrt(0.5), dtype_of(x)))
    x = let(x)
    tail = let(_scaled_tail(absolute(x)) * bell)
    return select(x > constant(0.0), constant(1.0) - tail, tail)


def _scaled_tail(a: Any) -> Any:
    # There the bell is 0; the polynomials would overflow far beyond. NaN is not below 15.
    a = let(select(a > constant(15.0), constant(15.0), a))
    top, bottom = _polynomial(_TAIL_TOP, a), _polynomial(_TAIL_BOTTOM, a)
    quotient_of_device = device_function("quotient", top, bottom)
    return top / bottom if quotient_of_device is None else quotient_of_device


def _polynomial(coefficients: tuple[float, ...], x: Any) -> Any:
    value = constant(coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + constant(coefficient)
    return value


def erf(x: Any) -> Any:
    """Return the error function; relative error below 3e-7 in float32."""
    if dtype_of(x) != "float32":
        return _extern("erf")(x)
    of_device = device_function("erf", x)
    if of_device is not None:
        return of_device
    x = let(x)
    size, square = let(absolute(x)), let(x * x)
    near = let(size * _polynomial(_ERF_SERIES, square))
    tail = _scaled_tail(size * constant(math.sqrt(2.0))) * exp(-square)
    far = constant(1.0) - constant(2.0) * tail
    return _with_sign(x, let(select(size < constant(1.0), near, far)))
