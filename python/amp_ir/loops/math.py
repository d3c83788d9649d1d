# SPDX-License-Identifier: Apache-2.0
"""Scalar functions of kernel elements that the CPU back end can vectorise.

TVM's LLVM output calls libm once per lane for exp, log, tanh and erf; the float32 versions below
are polynomials in plain arithmetic. Error bounds are tested against float64 in test_loops_math.py.
float64 arguments use libm: only optimizer scalars are float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import tirx

from amp_ir.loops.ir import bind, scalar_loop

# e^r for |r| <= ln 2 / 2 from the highest power on; the first two terms are exact, the others those
# of the least relative error, 3.1e-9 (Lawson's algorithm).
_EXP_SERIES = (
    0.001381459878757596, 0.008368716575205326, 0.04166838899254799, 0.1666652113199234,
    0.4999999403953552, 1.0, 1.0,
)  # fmt: skip
# The integers of a float's bits.
_WORDS = {"float32": "uint32", "float64": "uint64"}
# e^x is a normal number in between: the logarithms of 2^-126 and 2^128.
_EXP_LOW, _EXP_HIGH = -87.33654, 88.72284


def constant(number: float, dtype: str = "float32") -> Any:
    """A literal of `dtype`."""
    return tirx.const(number, dtype)


def libm(function: Any) -> Any:
    """A TIR function that only exists for one element at a time."""

    def call(*elements: Any) -> Any:
        scalar_loop()
        return function(*elements)

    return call


def dtype_of(element: Any) -> str:
    """The dtype of an element expression."""
    return str(element.ty.dtype)


def select(condition: Any, if_true: Any, if_false: Any) -> Any:
    """`if_true` where `condition` holds; both sides are evaluated."""
    return tirx.Select(condition, if_true, if_false)


def clamp(index: Any, extent: int) -> Any:
    """The index in [0, extent) nearest to `index`: for reads whose value a `select` then drops."""
    return tirx.max(tirx.min(index, tirx.const(extent - 1, "int32")), tirx.const(0, "int32"))


def inside(index: Any, extent: int) -> Any:
    """Whether `index` lies in [0, extent)."""
    return tirx.all(index >= tirx.const(0, "int32"), index < tirx.const(extent, "int32"))


def maximum(a: Any, b: Any) -> Any:
    """The larger one; NaN if either is NaN, as PyTorch's maximum."""
    a, b = bind(a), bind(b)
    larger = tirx.Select(a > b, a, b)
    return _nan_from(a, larger) if dtype_of(a).startswith("float") else larger


def minimum(a: Any, b: Any) -> Any:
    """The smaller one; NaN if either is NaN, as PyTorch's minimum."""
    a, b = bind(a), bind(b)
    smaller = tirx.Select(a < b, a, b)
    return _nan_from(a, smaller) if dtype_of(a).startswith("float") else smaller


def _nan_from(a: Any, otherwise: Any) -> Any:
    # A comparison with NaN fails, so `otherwise` is b already where b is NaN.
    return tirx.Select(isnan(a), a, otherwise)


def exp(x: Any) -> Any:
    """e^x; relative error below 1.2e-7 in float32; 0 and inf outside of the normal numbers.

    No number on the way is subnormal, whose arithmetic takes a CPU a hundred times as long: a mask
    has -inf everywhere.
    """
    if dtype_of(x) != "float32":
        return tirx.exp(x)
    x = bind(x)
    # x = n ln 2 + r with |r| <= ln 2 / 2; ln 2 in two parts (Cody and Waite). A number this large
    # has no bits below 1, so that the sum rounds, and its last bits are n.
    rounder = constant(1.5 * 2.0**23)
    shifted = bind(tirx.reinterpret("uint32", x * constant(1.4426950408889634) + rounder))
    n = bind(tirx.reinterpret("float32", shifted) - rounder)
    r = bind(x - n * constant(0.693359375))
    r = bind(r - n * constant(-2.12194440054690583e-4))
    series = constant(_EXP_SERIES[0])
    for coefficient in _EXP_SERIES[1:]:
        series = series * r + constant(coefficient)
    # 2^n is in the exponent's place; unsigned, for it may wrap where x is outside of the range.
    power = tirx.shift_left(shifted, tirx.const(23, "uint32"))
    result = tirx.reinterpret("float32", tirx.reinterpret("uint32", series) + power)
    # NaN is in no range, and x + inf is NaN for it.
    result = tirx.Select(x < constant(_EXP_HIGH), result, x + constant(math.inf))
    return tirx.Select(x < constant(_EXP_LOW), constant(0.0), result)


def opaque(x: Any) -> Any:
    """`x`, of which TVM's simplifier sees nothing; for float32 and float64, but no literals.

    It takes floats for real numbers: (x + y) - y becomes x, which is no rounding of x to what y
    leaves of it; x - x and 0 x become 0, and x == x true, also of NaN. A CPU's kernels are compiled
    without it; the code generation for CUDA needs it, for its indices.
    """
    words = _WORDS.get(dtype_of(x))
    if words is None or literal(x) is not None:
        return x
    return tirx.reinterpret(dtype_of(x), tirx.reinterpret(words, x))


def difference(a: Any, b: Any) -> Any:
    """`a` less `b`, whatever either is made of."""
    return opaque(a) - b if literal(b) is not None else a - opaque(b)


def product(a: Any, b: Any) -> Any:
    """`a` times `b`; NaN for 0 times inf."""
    if literal(a) is not None and literal(b) is not None:
        return _of_literals(np.multiply, a, b)
    if literal(a) == 0.0:
        a, b = b, a
    return tirx.Mul(a, _zero_beside(a)) if literal(b) == 0.0 else a * b


def quotient(a: Any, b: Any) -> Any:
    """`a` over `b`, floats; NaN for 0 over 0."""
    if literal(a) is not None and literal(b) is not None:
        return _of_literals(np.divide, a, b)
    if literal(a) == 0.0:
        return tirx.Div(_zero_beside(b), b)
    return tirx.Div(a, _zero_beside(a)) if literal(b) == 0.0 else a / b


def _of_literals(function: Any, a: Any, b: Any) -> Any:
    """What TVM would compute by laws of real numbers, or refuse to (1 / 0)."""
    dtype = dtype_of(a)
    with np.errstate(all="ignore"):
        number = function(*(np.asarray(one.value, dtype) for one in (a, b)))
    return constant(number.item(), dtype)


def _zero_beside(x: Any) -> Any:
    """0 in the dtype of `x`, by way of its bits where TVM would conclude from a literal 0."""
    words = _WORDS.get(dtype_of(x))
    if words is None or literal(x) is not None:
        return constant(0, dtype_of(x))
    bits = tirx.bitwise_and(tirx.reinterpret(words, x), tirx.const(0, words))
    return tirx.reinterpret(dtype_of(x), bits)


def signed_zero(x: Any) -> Any:
    """0 with the sign of a float."""
    words = _WORDS[dtype_of(x)]
    top = tirx.const(1 << (31 if words == "uint32" else 63), words)
    return tirx.reinterpret(dtype_of(x), tirx.bitwise_and(tirx.reinterpret(words, x), top))


def equals(a: Any, b: Any) -> Any:
    """Whether two numbers are equal, as NaN is to none."""
    return tirx.EQ(a, opaque(b))


def differs(a: Any, b: Any) -> Any:
    """Whether two numbers are not equal, as NaN is to all: TVM's `!=` says no of NaN on a CPU."""
    return tirx.Not(equals(a, b))


def log(x: Any) -> Any:
    """Natural logarithm; relative error below 2e-7 in float32; -inf at 0, NaN below."""
    if dtype_of(x) != "float32":
        return tirx.log(x)
    x = bind(x)
    tiny = bind(x < constant(1.17549435e-38))
    scaled = tirx.Select(tiny, x * constant(2.0**24), x)
    bits = tirx.reinterpret("int32", scaled)
    # m in [sqrt(1/2), sqrt(2)): subtract the bits of sqrt(1/2) so that the exponent rounds there.
    shifted = bind(bits - tirx.const(0x3F3504F3, "int32"))
    exponent = tirx.Cast("float32", tirx.shift_right(shifted, tirx.const(23, "int32")))
    exponent = bind(exponent - tirx.Select(tiny, constant(24.0), constant(0.0)))
    mantissa_bits = tirx.bitwise_and(shifted, tirx.const(0x007FFFFF, "int32")) + tirx.const(
        0x3F3504F3, "int32"
    )
    f = bind(tirx.reinterpret("float32", mantissa_bits) - constant(1.0))
    # log(1 + f) = 2 atanh(s), s = f / (2 + f) (fdlibm's reduction, series in s^2).
    s = bind(f / (constant(2.0) + f))
    z = bind(s * s)
    series = constant(2.0 / 9)
    for k in (7, 5, 3):
        series = series * z + constant(2.0 / k)
    half_square = bind(constant(0.5) * f * f)
    low = exponent * constant(-2.12194440054690583e-4)
    result = f - (half_square - (s * (half_square + series * z) + low))
    result = exponent * constant(0.693359375) + result
    result = tirx.Select(tirx.EQ(x, constant(0.0)), constant(-math.inf), result)
    result = tirx.Select(x < constant(0.0), constant(math.nan), result)
    return tirx.Select(tirx.any(isnan(x), tirx.EQ(x, constant(math.inf))), x, result)


def log1p(x: Any) -> Any:
    """log(1 + x), accurate for small x (Kahan's correction)."""
    if dtype_of(x) != "float32":
        return libm(tirx.log1p)(x)
    x = bind(x)
    u = bind(constant(1.0) + x)
    corrected = log(u) * (x / difference(u, constant(1.0)))
    is_one = tirx.EQ(u, constant(1.0))
    exact = tirx.any(is_one, tirx.EQ(u, constant(math.inf)))
    return tirx.Select(exact, tirx.Select(is_one, x, u), corrected)


def tanh(x: Any) -> Any:
    """Hyperbolic tangent; absolute error below 2e-7 in float32."""
    if dtype_of(x) != "float32":
        return tirx.tanh(x)
    x = bind(x)
    magnitude = bind(absolute(x))
    z = bind(x * x)
    # tanh x = x + x^3 P(x^2) near 0 (Cephes tanhf), 1 - 2 / (e^2x + 1) elsewhere.
    series = constant(-5.70498872745e-3)
    for c in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
        series = series * z + constant(c)
    small = series * z * x + x
    large = constant(1.0) - constant(2.0) / (exp(magnitude + magnitude) + constant(1.0))
    large = bind(large)
    signed = tirx.Select(x < constant(0.0), -large, large)
    return tirx.Select(magnitude < constant(0.625), small, signed)


def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x)."""
    one = constant(1.0, dtype_of(x))
    return one / (one + exp(-x))


def erf(x: Any) -> Any:
    """Error function; absolute error below 5e-7 in float32 (rational form of Eigen's erf)."""
    if dtype_of(x) != "float32":
        return libm(tirx.erf)(x)
    x = bind(x)
    limit = constant(3.832506856900711)
    z = bind(tirx.Select(x > limit, limit, tirx.Select(x < -limit, -limit, x)))
    square = bind(z * z)
    top = constant(0.00022905065861350646)
    for c in (0.0034082910107109506, 0.050955695062380861, 0.18520832239976145, 1.128379143519084):
        top = top * square + constant(c)
    bottom = constant(-1.1791602954361697e-7)
    for c in (2.3547966471313185e-05, 0.0010179625278914885, 0.014070470171167667,
              0.11098505178285362, 0.49746925110067538, 1.0):  # fmt: skip
        bottom = bottom * square + constant(c)
    return tirx.Select(isnan(x), x, z * top / bottom)


def isnan(x: Any) -> Any:
    """Whether x is NaN; never, for integers.

    By its bits in float32, which a CPU compares in fewer steps.
    """
    number = literal(x)
    if number is not None:
        return constant(math.isnan(number), "bool")
    if dtype_of(x) == "float32":
        bits = tirx.bitwise_and(tirx.reinterpret("int32", x), tirx.const(0x7FFFFFFF, "int32"))
        return bits > tirx.const(0x7F800000, "int32")
    return differs(x, x) if dtype_of(x) == "float64" else constant(False, "bool")


def sqrt(x: Any) -> Any:
    """Square root."""
    return tirx.sqrt(x)


def rsqrt(x: Any) -> Any:
    """1 / sqrt(x)."""
    return constant(1.0, dtype_of(x)) / tirx.sqrt(x)


def absolute(x: Any) -> Any:
    """|x|."""
    if dtype_of(x) == "float32":
        bits = tirx.bitwise_and(tirx.reinterpret("int32", x), tirx.const(0x7FFFFFFF, "int32"))
        return tirx.reinterpret("float32", bits)
    x, zero = bind(x), constant(0, dtype_of(x))
    return tirx.Select(x < zero, -x, x)


def power(x: Any, y: Any) -> Any:
    """x^y. Small constant integer and half-integer exponents are multiplications and roots."""
    exponent = literal(y)
    dtype = dtype_of(x)
    if exponent is not None and abs(exponent) <= 4 and float(exponent).is_integer():
        return _integer_power(x, int(exponent))
    if exponent in (0.5, -0.5):
        return sqrt(x) if exponent == 0.5 else rsqrt(x)
    if exponent == 1.5:
        x = bind(x)
        return x * sqrt(x)
    return tirx.power(x, y if dtype_of(y) == dtype else tirx.Cast(dtype, y))


def _integer_power(x: Any, exponent: int) -> Any:
    x, one = bind(x), constant(1, dtype_of(x))
    result = one
    for k in range(abs(exponent)):
        result = x if k == 0 else result * x
    return one / result if exponent < 0 else result


def literal(x: Any) -> float | None:
    """The number that `x` is a literal of, or None."""
    if isinstance(x, (int, float)):
        return float(x)
    value = getattr(x, "value", None)
    return float(value) if isinstance(value, (int, float, np.number)) else None


def cast(x: Any, dtype: str) -> Any:
    """Convert an element to `dtype` as PyTorch's `.to` does."""
    if dtype_of(x) == dtype:
        return x
    if dtype == "bool":
        return differs(x, constant(0, dtype_of(x)))
    if dtype_of(x) == "bool":
        return tirx.Select(x, constant(1, dtype), constant(0, dtype))
    return tirx.Cast(dtype, x)
