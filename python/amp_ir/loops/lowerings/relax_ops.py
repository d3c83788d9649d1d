# SPDX-License-Identifier: Apache-2.0
"""Lowerings of Relax's own ops to loop values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tvm import relax, tirx

from amp_ir.ir.image_layout import TO_FIRST, TO_LAST
from amp_ir.loops import division, integers
from amp_ir.loops import math as m
from amp_ir.loops.codegen.kernel_buffers import stored_element
from amp_ir.loops.ir import (
    Constant,
    Lowering,
    TensorSpec,
    Value,
    channels_first,
    channels_last,
    compute_dtype,
    elementwise,
    let,
    lowers,
    pointwise,
    reduce,
    reshape,
)

Scalar = Callable[..., Any]


def _one(x: Any) -> Any:
    return m.constant(1, m.dtype_of(x))


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
    half = m.constant(-0.5, m.dtype_of(x))
    return x * m.normal_cdf(x, m.exp(x * x * half))


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
            element > _zero(element), element, element * m.constant(alpha, m.dtype_of(element))
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


@lowers("relax.reshape")
def lower_reshape(op: Lowering, x: Value, *_shape: Any) -> Value:
    """Return the same elements under another shape."""
    return reshape(x, op.results[0].shape)


@lowers("relax.permute_dims")
def permute_dims(op: Lowering, x: Value) -> Value:
    """Permute the dimensions."""
    axes = op.call.attrs.axes
    order = [int(a) for a in axes] if axes is not None else list(reversed(range(len(x.shape))))
    shape = op.results[0].shape
    inner = channels_last(x)
    if inner is not None and tuple(order) == TO_LAST:
        return inner
    moved = [n for n in order if x.shape[n] > 1]
    if moved == sorted(moved):
        return reshape(x, shape)
    if tuple(order) == TO_FIRST:
        return channels_first(x)
    source = [order.index(d) for d in range(len(order))]
    return pointwise(shape, x.dtype, lambda *i: x[tuple(i[k] for k in source)], is_view=True)


@lowers("relax.broadcast_to")
def broadcast_to(op: Lowering, x: Value, *_shape: Any) -> Value:
    """Repeat x along new or unit dimensions."""
    return pointwise(op.results[0].shape, x.dtype, lambda *i: x[i], is_view=True)


@lowers("relax.strided_slice")
def strided_slice(op: Lowering, x: Value, *bounds: Any) -> Value:
    """Take every step-th element from begin along some axes; negative begins count from the end."""
    axes, begins, _ends, steps = slice_bounds(op.call)
    begin = {axis % len(x.shape): (b, s) for axis, b, s in zip(axes, begins, steps, strict=True)}
    start = {
        d: (min(max(b + x.shape[d] if b < 0 else b, 0), x.shape[d] - (s < 0)), s)
        for d, (b, s) in begin.items()
    }

    def body(*i: Any) -> Any:
        return x[tuple(
            k * start[d][1] + start[d][0] if d in start else k for d, k in enumerate(i)
        )]  # fmt: skip

    return pointwise(op.results[0].shape, x.dtype, body, is_view=True)


def slice_bounds(call: relax.Call) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return axes, begins, ends and steps of a `relax.strided_slice` with constant bounds."""
    numbers = [[int(field.value) for field in _fields(argument)] for argument in call.args[1:]]
    axes, begins, ends = numbers[0], numbers[1], numbers[2]
    steps = numbers[3] if len(numbers) > 3 and numbers[3] else [1] * len(axes)
    return axes, begins, ends, steps


def _fields(argument: Any) -> list[Any]:
    return list(argument.fields) if isinstance(argument, relax.Tuple) else []


@lowers("relax.flip")
def flip(op: Lowering, x: Value) -> Value:
    """Reverse x along one axis."""
    axis = int(op.call.attrs.axis) % len(x.shape)
    last = x.shape[axis] - 1

    def body(*i: Any) -> Any:
        return x[tuple(last - k if d == axis else k for d, k in enumerate(i))]

    return pointwise(x.shape, x.dtype, body, is_view=True)


@lowers("relax.concat")
def concat(op: Lowering, *parts: Value) -> Value:
    """Concatenate values along an axis."""
    result = op.results[0]
    axis = int(op.call.attrs.axis) % len(result.shape)
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + part.shape[axis])

    def body(*i: Any) -> Any:
        element = None
        for part, start in reversed(list(zip(parts, starts, strict=False))):
            at = m.clamp(i[axis] - start, part.shape[axis])
            value = part[tuple(at if d == axis else k for d, k in enumerate(i))]
            after = i[axis] >= tirx.const(start + part.shape[axis], "int32")
            element = value if element is None else m.select(after, element, value)
        return element

    rows = math.prod(result.shape[:axis])
    return pointwise(result.shape, result.dtype, body, parts=parts, part_rows=rows)


@lowers("relax.full", "relax.zeros", "relax.ones")
def full(op: Lowering, *arguments: Any) -> Value:
    """Fill with one number."""
    result = op.results[0]
    fill = next((a for a in arguments if isinstance(a, Value)), None)
    number = {"relax.zeros": 0, "relax.ones": 1}.get(op.name, 0)
    if fill is None:
        literal = m.constant(number, compute_dtype(result.dtype))
        return pointwise(result.shape, result.dtype, lambda *i: literal)
    target = compute_dtype(result.dtype)
    return pointwise(
        result.shape, result.dtype, lambda *i: m.cast(fill[()], target), is_view=True
    )  # fmt: skip


@lowers("relax.arange")
def arange(op: Lowering, start: Any, _end: Any, step: Any) -> Value:
    """Return start, start + step, ..."""
    result = op.results[0]
    first, by = _number(start), _number(step)
    target = compute_dtype(result.dtype)

    def body(i: Any) -> Any:
        at = tirx.Cast(target, i) if target != "int32" else i
        return at * m.constant(by, target) + m.constant(first, target)

    return pointwise(result.shape, result.dtype, body)


def _number(argument: Any) -> float | int:
    value = getattr(argument, "value", argument)
    return getattr(value, "value", value)


_REDUCTIONS = {"relax.sum": "sum", "relax.max": "max", "relax.min": "min", "relax.prod": "prod"}


@lowers("relax.sum", "relax.max", "relax.min", "relax.prod", "relax.mean")
def reduction(op: Lowering, x: Value) -> Value:
    """Reduce by sum, mean, maximum, minimum or product over some axes."""
    result = op.results[0]
    axes = op.call.attrs.axis
    over = [int(a) % len(x.shape) for a in axes] if axes is not None else range(len(x.shape))
    axes_tuple = tuple(sorted(over))
    if not x.shape:
        return reshape(x, result.shape)
    dtype = compute_dtype(result.dtype)
    kind: Any = _REDUCTIONS.get(op.name, "sum")
    flags = {}
    if op.name == "relax.mean":
        flags["divisor"] = math.prod(x.shape[axis] for axis in axes_tuple)
    total = reduce(kind, x.shape, axes_tuple, lambda *i: m.cast(x[i], dtype), dtype, **flags)
    if dtype == result.dtype:
        return reshape(total, result.shape)
    rounded = pointwise(total.shape, result.dtype, lambda *i: total[i])
    return reshape(rounded, result.shape)


@lowers("relax.nn.softmax", "relax.nn.log_softmax")
def softmax(op: Lowering, x: Value) -> Value:
    """Compute exp(x - max) / sum, or x - max - log(sum), along one axis."""
    axis = int(op.call.attrs.axis) % len(x.shape)
    dtype, wide = op.results[0].dtype, compute_dtype(x.dtype)
    peak = reduce("max", x.shape, (axis,), lambda *i: x[i], wide)

    def shifted(*i: Any) -> Any:
        return m.rounded(x[i]) - peak[i]

    total = reduce("sum", x.shape, (axis,), lambda *i: m.exp(shifted(*i)), wide)
    if op.name == "relax.nn.softmax":
        scale = pointwise(total.shape, wide, lambda *i: m.constant(1.0, wide) / total[i])
        return pointwise(x.shape, dtype, lambda *i: m.exp(shifted(*i)) * scale[i])
    # Not x - (peak + log): near the peak the sum of the two would round away the difference.
    log_total = pointwise(total.shape, wide, lambda *i: m.log(total[i]))
    return pointwise(x.shape, dtype, lambda *i: shifted(*i) - log_total[i])


@lowers("relax.tril", "relax.triu")
def triangle(op: Lowering, x: Value, k: Any) -> Value:
    """Keep the part on and below (tril) or above (triu) the k-th diagonal; zero elsewhere."""
    offset = int(_number(k))
    is_lower = op.name == "relax.tril"

    def body(*i: Any) -> Any:
        element = x[i]
        difference = i[-1] - i[-2]
        bound = tirx.const(offset, "int32")
        kept = difference <= bound if is_lower else difference >= bound
        return m.select(kept, element, _zero(element))

    return pointwise(x.shape, op.results[0].dtype, body)


@lowers("relax.take")
def take(op: Lowering, x: Value, ids: Value) -> Value:
    """Gather slices of x at ids along an axis."""
    result = op.results[0]
    axis = op.call.attrs.axis
    axis = int(axis) % len(x.shape) if axis is not None else 0
    rank = len(ids.shape)

    def body(*i: Any) -> Any:
        at = row_index(ids[tuple(i[axis : axis + rank])], x.shape[axis])
        return x[(*i[:axis], at, *i[axis + rank :])]

    return pointwise(result.shape, result.dtype, body)


def row_index(element: Any, extent: int) -> Any:
    """Return an id read from memory as an index in [0, extent); negative ids count from the end."""
    at = let(tirx.Cast("int32", element))
    wrapped = m.select(at < tirx.const(0, "int32"), at + tirx.const(extent, "int32"), at)
    return let(m.clamp(wrapped, extent))


@lowers("relax.gather_elements")
def gather_elements(op: Lowering, x: Value, ids: Value) -> Value:
    """Gather x[..., ids[i], ...] along one axis."""
    axis = int(op.call.attrs.axis) % len(x.shape)

    def body(*i: Any) -> Any:
        at = row_index(ids[i], x.shape[axis])
        return x[tuple(at if d == axis else k for d, k in enumerate(i))]

    return pointwise(op.results[0].shape, op.results[0].dtype, body)


@lowers("relax.argmax", "relax.argmin")
def arg_reduction(op: Lowering, x: Value) -> Value:
    """Return the position of the first extreme along one axis (or of the flattened value)."""
    result = op.results[0]
    axis = op.call.attrs.axis
    source = x if axis is not None else reshape(x, (x.size,))
    d = int(axis) % len(x.shape) if axis is not None else 0
    is_max = op.name == "relax.argmax"
    dtype = compute_dtype(x.dtype)

    def read(*i: Any) -> Any:
        return stored_element(source, i)

    best = reduce("max" if is_max else "min", source.shape, (d,), read, dtype)
    far = m.constant(2**31 - 1, "int32")

    def position(*i: Any) -> Any:
        element, extreme = let(read(*i)), let(best[i])
        hit = tirx.any(tirx.EQ(element, extreme), m.isnan(element))
        return m.select(hit, i[d], far)

    first = reduce("min", source.shape, (d,), position, "int32")
    wide = pointwise(first.shape, result.dtype, lambda *i: m.cast(first[i], result.dtype))
    return reshape(wide, result.shape)


def constant_value(number: float | int | bool, dtype: str) -> Constant:
    """Return the value of a scalar constant."""
    return Constant(TensorSpec((), dtype), number=number)
