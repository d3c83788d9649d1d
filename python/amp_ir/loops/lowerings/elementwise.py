# SPDX-License-Identifier: Apache-2.0
"""Lowerings of Relax's elementwise ops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm import tirx

from amp_ir.loops import division, integers
from amp_ir.loops import math as m
from amp_ir.loops.body_context import let
from amp_ir.loops.builders import elementwise, pointwise
from amp_ir.loops.codegen.kernel_buffers import stored_element
from amp_ir.loops.ir import Value, compute_dtype
from amp_ir.loops.lowering_registry import Lowering, lowers

Scalar = Callable[..., Any]


def _zero(x: Any) -> Any:
    return m.constant(0, m.dtype_of(x))


def _sign(x: Any) -> Any:
    """Return 1, 0 or -1; 0 for NaN, as in PyTorch."""
    x = let(x)
    positive = m.cast(x > _zero(x), m.dtype_of(x))
    if m.dtype_of(x).startswith("uint"):
        return positive
    return m.select(x < _zero(x), m.constant(-1, m.dtype_of(x)), positive)


def _round_half_even(x: Any) -> Any:
    return m.libm(tirx.nearbyint)(x)


def _isinf(x: Any) -> Any:
    return tirx.EQ(m.absolute(x), m.constant(math.inf, m.dtype_of(x)))


def _isfinite(x: Any) -> Any:
    return m.absolute(x) < m.constant(math.inf, m.dtype_of(x))


def gelu(x: Any) -> Any:
    """Return x Phi(x), Phi the normal distribution function."""
    x = let(x)
    # As in `gelu_backward`: kernels that need both compute the bell once.
    return x * m.normal_cdf(x, let(m.bell(x)))


def gelu_tanh(x: Any) -> Any:
    """Return GELU by tanh (Hendrycks and Gimpel 2016): (1 + tanh y) / 2 = sigmoid 2y."""
    x = let(x)
    scale, cubic = (
        m.constant(number, m.dtype_of(x)) for number in (math.sqrt(8 / math.pi), 0.044715)
    )
    return x * m.sigmoid(scale * (x + cubic * x * x * x))


def _divide(a: Any, b: Any) -> Any:
    return division.truncated(a, b) if _is_integer(a) else m.quotient(a, b)


def _is_integer(x: Any) -> bool:
    return integers.is_integer(m.dtype_of(x))


def _on_integers(on_integers: Scalar, on_others: Scalar) -> Scalar:
    """Choose one function for integers, another for floats and bool."""

    def apply(*elements: Any) -> Any:
        return (on_integers if _is_integer(elements[0]) else on_others)(*elements)

    return apply


UNARY: dict[str, Scalar] = {
    "relax.abs": _on_integers(integers.absolute, m.absolute),
    "relax.negative": _on_integers(integers.negative, lambda x: -x),
    "relax.exp": m.exp,
    "relax.log": m.log,
    "relax.sqrt": m.sqrt,
    "relax.rsqrt": m.rsqrt,
    "relax.sin": tirx.sin,
    "relax.cos": tirx.cos,
    "relax.tan": tirx.tan,
    "relax.asin": m.libm(tirx.asin),
    "relax.acos": m.libm(tirx.acos),
    "relax.atan": m.libm(tirx.atan),
    "relax.sinh": m.sinh,
    "relax.cosh": m.cosh,
    "relax.asinh": m.libm(tirx.asinh),
    "relax.acosh": m.libm(tirx.acosh),
    "relax.atanh": m.atanh,
    "relax.tanh": m.tanh,
    "relax.sigmoid": m.sigmoid,
    "relax.erf": m.erf,
    "relax.floor": tirx.floor,
    "relax.ceil": tirx.ceil,
    "relax.round": _round_half_even,
    "relax.trunc": tirx.trunc,
    "relax.sign": _sign,
    "relax.square": lambda x: m.power(x, 2),
    "relax.logical_not": lambda x: tirx.Not(x),
    "relax.bitwise_not": lambda x: tirx.Not(x) if m.dtype_of(x) == "bool" else tirx.bitwise_not(x),
    "relax.nn.relu": m.relu,
    "relax.nn.silu": lambda x: let(x) * m.sigmoid(x),
    "relax.nn.gelu": gelu,
    "relax.nn.gelu_tanh": gelu_tanh,
}


def _equal(a: Any, b: Any) -> Any:
    return m.equals(_number_of(a), _number_of(b))


def _not_equal(a: Any, b: Any) -> Any:
    return m.differs(_number_of(a), _number_of(b))


def _number_of(a: Any) -> Any:
    """Convert a bool to 0 or 1: code generation compares bools as floats (TVM 0.27)."""
    return m.cast(a, "int32") if m.dtype_of(a) == "bool" else a


def _ordered(compare: Scalar) -> Scalar:
    """Compare two numbers; TVM's simplifier aborts on some comparisons of unsigned ones (0.27)."""

    def apply(a: Any, b: Any) -> Any:
        if m.dtype_of(a).startswith("uint"):
            a, b = tirx.Cast("int32", a), tirx.Cast("int32", b)
        return compare(a, b)

    return apply


def _on_bool(logical: Scalar, bitwise: Scalar) -> Scalar:
    """Choose logical `&` and `|` for bool and bitwise ones for integers, as PyTorch does."""

    def apply(a: Any, b: Any) -> Any:
        return logical(a, b) if m.dtype_of(a) == "bool" else bitwise(a, b)

    return apply


PREDICATES: dict[str, Scalar] = {
    "relax.isfinite": _isfinite,
    "relax.isinf": _isinf,
    "relax.isnan": lambda x: m.isnan(let(x)),
    "relax.equal": _equal,
    "relax.not_equal": _not_equal,
    "relax.less": _ordered(tirx.LT),
    "relax.less_equal": _ordered(tirx.LE),
    "relax.greater": _ordered(tirx.GT),
    "relax.greater_equal": _ordered(tirx.GE),
}
BINARY: dict[str, Scalar] = {
    "relax.add": _on_integers(
        integers.add, lambda a, b: tirx.any(a, b) if m.dtype_of(a) == "bool" else m.total(a, b)
    ),
    "relax.subtract": _on_integers(integers.subtract, m.difference),
    "relax.multiply": _on_integers(
        integers.multiply,
        lambda a, b: tirx.all(a, b) if m.dtype_of(a) == "bool" else m.product(a, b),
    ),
    "relax.divide": _divide,
    "relax.floor_divide": division.floored,
    "relax.mod": division.remainder,
    "relax.floor_mod": division.floor_remainder,
    "relax.power": _on_integers(integers.power, m.power),
    "relax.maximum": m.maximum,
    "relax.minimum": m.minimum,
    "relax.logical_and": lambda a, b: tirx.all(a, b),
    "relax.logical_or": lambda a, b: tirx.any(a, b),
    "relax.logical_xor": _not_equal,
    "relax.bitwise_and": _on_bool(lambda a, b: tirx.all(a, b), tirx.bitwise_and),
    "relax.bitwise_or": _on_bool(lambda a, b: tirx.any(a, b), tirx.bitwise_or),
    "relax.bitwise_xor": _on_bool(_not_equal, tirx.bitwise_xor),
    "relax.left_shift": integers.left_shift,
    "relax.right_shift": integers.right_shift,
}


def _lower_elementwise(name: str, scalar: Scalar) -> None:
    @lowers(name)
    def lower(op: Lowering, *arguments: Value) -> Value:
        result = op.results[0]
        return elementwise(
            result.shape, result.dtype, arguments, lambda *i: scalar(*(a[i] for a in arguments))
        )


for _name, _scalar in {**UNARY, **BINARY}.items():
    _lower_elementwise(_name, _scalar)


def _lower_predicate(name: str, predicate: Scalar) -> None:
    @lowers(name)
    def lower(op: Lowering, *arguments: Value) -> Value:
        return elementwise(
            op.results[0].shape,
            "bool",
            arguments,
            lambda *i: predicate(*(stored_element(a, i) for a in arguments)),
        )


for _name, _scalar in PREDICATES.items():
    _lower_predicate(_name, _scalar)


@lowers("relax.nn.leakyrelu")
def leaky_relu(op: Lowering, x: Value) -> Value:
    """Return x where positive, alpha x elsewhere."""
    alpha = float(op.call.attrs.alpha)

    def body(*i: Any) -> Any:
        element = let(x[i])
        return m.select(
            element > _zero(element),
            element,
            m.product(element, m.constant(alpha, m.dtype_of(element))),
        )

    return pointwise(x.shape, op.results[0].dtype, body)


@lowers("relax.where")
def where(op: Lowering, condition: Value, a: Value, b: Value) -> Value:
    """Return `a` where `condition`, else `b`."""
    result = op.results[0]
    return elementwise(
        result.shape,
        result.dtype,
        (condition, a, b),
        lambda *i: m.select(condition[i], a[i], b[i]),
    )


@lowers("relax.astype", "amp_ir.cast")
def cast(op: Lowering, x: Value, **_options: Any) -> Value:
    """Change the dtype; the user's own cast (astype) rounds even inside of a kernel.

    Elements are read in their compute dtype: every reader widens to that anyway, so a widening
    cast is a view, and memory holds the narrow value.
    """
    result = op.results[0]
    target = compute_dtype(result.dtype)
    return elementwise(
        x.shape, result.dtype, (x,), lambda *i: m.cast(x[i], target), is_cast=True,
        rounds=op.name == "relax.astype",
        is_view=x.dtype != result.dtype and result.dtype == compute_dtype(x.dtype),
    )  # fmt: skip
