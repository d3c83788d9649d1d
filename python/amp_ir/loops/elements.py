# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on kernel elements: literals, comparisons, float arithmetic that keeps rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import attrs
import numpy as np
from tvm import tirx
from tvm.ir.expr import TensorLoad

from amp_ir.loops.body_context import assigned, let, scalar_loop

# The integers of a float's bits.
_WORDS = {"float32": "uint32", "float64": "uint64"}


def constant(number: float, dtype: str = "float32") -> Any:
    """Return a literal of `dtype`."""
    return tirx.const(number, dtype)


def libm(function: Any) -> Any:
    """Return a TIR function that exists for one element at a time only."""

    def call(*elements: Any) -> Any:
        scalar_loop()
        return function(*elements)

    return call


def dtype_of(element: Any) -> str:
    """Return the dtype of an element expression."""
    return str(element.ty.dtype)


def select(condition: Any, if_true: Any, if_false: Any) -> Any:
    """Return `if_true` where `condition` is true, else `if_false`; both sides are evaluated.

    TVM's interval analysis (0.27) gives up on a product of a choice between two floats that it
    knows nothing of ("IntImm supports only int"), under whatever name: it must not see the choice.
    """
    chosen = tirx.Select(condition, if_true, if_false)
    return (
        chosen
        if literal(if_true) is not None or literal(if_false) is not None
        else optimization_barrier(chosen)
    )


def clamp(index: Any, extent: int) -> Any:
    """Clamp an index to [0, extent), for reads whose value a `select` then drops."""
    return tirx.max(tirx.min(index, tirx.const(extent - 1, "int32")), tirx.const(0, "int32"))


def inside(index: Any, extent: int) -> Any:
    """Return whether `index` is in [0, extent)."""
    return tirx.all(index >= tirx.const(0, "int32"), index < tirx.const(extent, "int32"))


def relu(x: Any) -> Any:
    """Return max(x, 0); NaN and -0 stay."""
    x = let(x)
    return tirx.Select(x < constant(0, dtype_of(x)), constant(0, dtype_of(x)), x)


def maximum(a: Any, b: Any) -> Any:
    """Return the larger one; NaN if either is NaN, as PyTorch's maximum."""
    of_device = device_function("maximum", a, b)
    if of_device is not None:
        return of_device
    a, b = let(a), let(b)
    larger = select(a > b, a, b)
    return _nan_from(a, larger) if dtype_of(a).startswith("float") else larger


def larger(a: Any, b: Any) -> Any:
    """Return the larger one; either if one is NaN: an instruction of a CPU."""
    of_device = device_function("maximum", a, b)
    if of_device is not None:
        return of_device
    a, b = let(a), let(b)
    return select(a > b, a, b)


def minimum(a: Any, b: Any) -> Any:
    """Return the smaller one; NaN if either is NaN, as PyTorch's minimum."""
    of_device = device_function("minimum", a, b)
    if of_device is not None:
        return of_device
    a, b = let(a), let(b)
    smaller = select(a < b, a, b)
    return _nan_from(a, smaller) if dtype_of(a).startswith("float") else smaller


def _nan_from(a: Any, otherwise: Any) -> Any:
    # A comparison with NaN fails, so `otherwise` is b already where b is NaN.
    return select(isnan(a), a, otherwise)


def optimization_barrier(x: Any) -> Any:
    """Hide `x` from TVM's simplifier; for float32 and float64, but no literals.

    The simplifier treats floats as real numbers: (x + y) - y becomes x, without the rounding of
    the sum; x - x and 0 x become 0, and x == x true, also for NaN. The kernels of a CPU are
    compiled without it; CUDA code generation needs it, for its indices.
    """
    words = _WORDS.get(dtype_of(x))
    if words is None or literal(x) is not None:
        return x
    return tirx.reinterpret(dtype_of(x), tirx.reinterpret(words, x))


@attrs.frozen
class DeviceFunctions:
    """What a device computes better than arithmetic in the kernel.

    `fence`: a number that no contraction fuses. `functions`: names of float32 functions by ours.
    `bfloat16_bits` rounds a float32. `scaled` multiplies a float32 by two to the power of another,
    which is a whole number, and returns 0 where its third argument is true.
    """

    fence: Callable[[Any], Any]
    functions: Mapping[str, str] = attrs.field(factory=dict)
    bfloat16_bits: Callable[[Any], Any] | None = None
    scaled: Callable[[Any, Any, Any], Any] | None = None


_device: ContextVar[DeviceFunctions | None] = ContextVar("device", default=None)


def written_for(device: DeviceFunctions) -> AbstractContextManager[None]:
    """Use a device's functions inside the block, in which a kernel is written."""
    return assigned(_device, device)


def device_function(name: str, *arguments: Any) -> Any:
    """Call the device's own float32 function; None where it has none, or for another dtype."""
    device = _device.get()
    if device is None or name not in device.functions or dtype_of(arguments[0]) != "float32":
        return None
    return tirx.call_pure_extern("float32", device.functions[name], *arguments)


def device_bfloat16_bits(element: Any) -> Any:
    """Round a float32 by the device's instruction; None where it has none."""
    device = _device.get()
    return None if device is None or device.bfloat16_bits is None else device.bfloat16_bits(element)


def device_scaled() -> Callable[[Any, Any, Any], Any] | None:
    """Return the device's product of a float32 and a power of two; None where it has none."""
    device = _device.get()
    return None if device is None else device.scaled


def rounded(x: Any) -> Any:
    """Return `x` as a rounded value that no compiler contracts with what reads it.

    LLVM and nvcc turn `s * c - max` into one fused multiply-add, in one loop of a kernel and not in
    another. The maximum of the rounded products is then not the maximum of what is exponentiated,
    and a row of a softmax adds up to 1 only within half a unit in the last place of its logits.
    """
    device = _device.get()
    if device is None or isinstance(x, TensorLoad) or literal(x) is not None:
        return x
    return device.fence(x)


def total(a: Any, b: Any) -> Any:
    """Add two floats; -0 + 0 is 0."""
    if _is_zero(a, 1.0):
        a, b = b, a
    return tirx.Add(a, _zero_beside(a, b)) if _is_zero(b, 1.0) else a + b


def _is_zero(x: Any, sign: float) -> bool:
    number = literal(x)
    return number == 0.0 and math.copysign(1.0, number) == sign


def difference(a: Any, b: Any) -> Any:
    """Subtract `b` from `a`, whatever the operands are."""
    if _is_zero(b, -1.0) and literal(a) is None:
        return tirx.Sub(a, _zero_beside(a, b))
    return optimization_barrier(a) - b if literal(b) is not None else a - optimization_barrier(b)


def product(a: Any, b: Any) -> Any:
    """Multiply two floats; 0 times inf is NaN."""
    if literal(a) is not None and literal(b) is not None:
        return _of_literals(np.multiply, a, b)
    if literal(a) == 0.0:
        a, b = b, a
    return tirx.Mul(a, _zero_beside(a, b)) if literal(b) == 0.0 else a * b


def quotient(a: Any, b: Any) -> Any:
    """Divide two floats; 0 / 0 is NaN."""
    if literal(a) is not None and literal(b) is not None:
        return _of_literals(np.divide, a, b)
    if literal(a) == 0.0:
        return tirx.Div(_zero_beside(b, a), b)
    return tirx.Div(a, _zero_beside(a, b)) if literal(b) == 0.0 else a / b


def _of_literals(function: Any, a: Any, b: Any) -> Any:
    """Fold literals that TVM would fold by laws of real numbers, or reject (1 / 0)."""
    dtype = dtype_of(a)
    with np.errstate(all="ignore"):
        number = function(*(np.asarray(one.value, dtype) for one in (a, b)))
    return constant(number.item(), dtype)


def _zero_beside(x: Any, zero: Any) -> Any:
    """Return a literal 0 or -0 through the bits of `x`, so that TVM does not fold the literal."""
    words = _WORDS.get(dtype_of(x))
    if words is None or literal(x) is not None:
        return constant(0, dtype_of(x))
    is_negative = math.copysign(1.0, float(zero.value)) < 0
    top = 1 << (31 if words == "uint32" else 63)
    bits = tirx.bitwise_and(tirx.reinterpret(words, x), tirx.const(0, words))
    bits = tirx.bitwise_or(bits, tirx.const(top, words)) if is_negative else bits
    return tirx.reinterpret(dtype_of(x), bits)


def signed_zero(x: Any) -> Any:
    """Return 0 with the sign of a float."""
    words = _WORDS[dtype_of(x)]
    top = tirx.const(1 << (31 if words == "uint32" else 63), words)
    return tirx.reinterpret(dtype_of(x), tirx.bitwise_and(tirx.reinterpret(words, x), top))


def equals(a: Any, b: Any) -> Any:
    """Return whether two numbers are equal; NaN equals nothing."""
    return tirx.EQ(a, optimization_barrier(b))


def differs(a: Any, b: Any) -> Any:
    """Return whether two numbers differ; NaN does from all, which TVM's `!=` denies on a CPU."""
    return tirx.Not(equals(a, b))


def isnan(x: Any) -> Any:
    """Return whether x is NaN; false for integers.

    Compares the bits of a float32, which takes a CPU fewer steps.
    """
    number = literal(x)
    if number is not None:
        return constant(math.isnan(number), "bool")
    if dtype_of(x) == "float32":
        bits = tirx.bitwise_and(tirx.reinterpret("int32", x), tirx.const(0x7FFFFFFF, "int32"))
        return bits > tirx.const(0x7F800000, "int32")
    return differs(x, x) if dtype_of(x) == "float64" else constant(False, "bool")


def sqrt(x: Any) -> Any:
    """Return the square root."""
    return tirx.sqrt(x)


def rsqrt(x: Any) -> Any:
    """Return 1 / sqrt(x)."""
    return constant(1.0, dtype_of(x)) / tirx.sqrt(x)


def absolute(x: Any) -> Any:
    """Return |x| of a float."""
    words = _WORDS[dtype_of(x)]
    mask = tirx.const((1 << (31 if words == "uint32" else 63)) - 1, words)
    return tirx.reinterpret(dtype_of(x), tirx.bitwise_and(tirx.reinterpret(words, x), mask))


def power(x: Any, y: Any) -> Any:
    """Return x^y; small constant integer and half-integer exponents use products and roots."""
    exponent = literal(y)
    dtype = dtype_of(x)
    if exponent is not None and -2 <= exponent <= 4 and float(exponent).is_integer():
        return _integer_power(x, int(exponent))
    # Not tirx.power, which warns of literal exponents.
    y = y if dtype_of(y) == dtype else tirx.Cast(dtype, y)
    return tirx.call_intrin(dtype, "tirx.pow", x, y)


def _integer_power(x: Any, exponent: int) -> Any:
    x, one = let(x), constant(1, dtype_of(x))
    result = one
    for k in range(abs(exponent)):
        result = x if k == 0 else result * x
    return one / result if exponent < 0 else result


def literal(x: Any) -> float | None:
    """Return the number of a literal, or None."""
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
    if dtype_of(x).startswith("float") and dtype.startswith(("int", "uint")):
        return _truncated(x, dtype)
    if not dtype_of(x).startswith(("int", "uint")) or isinstance(x, TensorLoad):
        return tirx.Cast(dtype, x)
    if dtype.startswith(("int", "uint")):
        return _wrapped(x, dtype)
    # It asserts where it looks for the bounds of a float times a number that has some.
    return optimization_barrier(tirx.Cast(dtype, x))


def _wrapped(x: Any, dtype: str) -> Any:
    """Convert an integer to another dtype, whose bits are the low ones of it.

    By arithmetic: TVM (0.27) computes a cast of an unrolled index itself, and refuses a number that
    the dtype cannot hold.
    """
    given, wanted = np.iinfo(dtype_of(x)), np.iinfo(dtype)
    if wanted.bits == 64 or (wanted.min <= given.min and given.max <= wanted.max):
        return tirx.Cast(dtype, x)
    wide = dtype_of(x) if given.bits > wanted.bits else "int64"
    low = tirx.bitwise_and(tirx.Cast(wide, x), constant(2**wanted.bits - 1, wide))
    if wanted.min < 0:
        half = constant(-wanted.min, wide)
        low = tirx.bitwise_xor(low, half) - half
    return tirx.Cast(dtype, low)


def _truncated(x: Any, dtype: str) -> Any:
    """Convert a float to an integer, towards 0; out of range it is the lowest, as on x86.

    PyTorch converts to 32 or 64 bits, of which narrower integers are the low ones.
    """
    wide = "int64" if dtype == "int64" else "int32"
    x = let(x)
    bound = 2.0 ** (63 if wide == "int64" else 31)
    held = absolute(x) < constant(bound, dtype_of(x))
    whole = tirx.Cast(wide, tirx.Select(held, x, constant(-bound, dtype_of(x))))
    return whole if wide == dtype else tirx.Cast(dtype, whole)
