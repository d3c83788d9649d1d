# SPDX-License-Identifier: Apache-2.0
"""Padding rules of ops that compute each element from those at the same place."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from amp_ir.padding import pad_range
from amp_ir.padding.limits import holds_places, limit_of_elements, with_order
from amp_ir.padding.pad_range import ANY, BOOL, NOT_NEGATIVE, ZERO, Range
from amp_ir.padding.padded_call import PaddedCall, PaddedTensor, Rule, broadcast, rule_for


def _keeps_zero(a: Range) -> Range:
    """Apply a function that is finite for finite numbers, and 0 at 0."""
    return ZERO if a.is_zero else pad_range.finite_of(a)


def _keeps_sign(a: Range) -> Range:
    return NOT_NEGATIVE if a.low >= 0 and a.is_finite and not a.is_zero else _keeps_zero(a)


def _bounded(a: Range) -> Range:
    """Apply a function to [-1, 1] that keeps signs, but for those of sin."""
    return ZERO if a.is_zero else Range(-1.0, 1.0) if a.is_finite else ANY


def _absolute(a: Range) -> Range:
    known = pad_range.maximum(a, pad_range.negative(a))
    return a if a.low >= 0 else attrs.evolve(known, low=max(known.low, 0.0))


def _relu(a: Range) -> Range:
    return pad_range.maximum(a, ZERO)


def _not(function: Callable[[Range, Range], Range]) -> Callable[[Range, Range], Range]:
    return lambda a, b: pad_range.logical_not(function(a, b))


def _and(a: Range, b: Range) -> Range:
    return pad_range.minimum(pad_range.as_bool(a), pad_range.as_bool(b))


def _or(a: Range, b: Range) -> Range:
    return pad_range.maximum(pad_range.as_bool(a), pad_range.as_bool(b))


def _is_bool(*_ranges: Range) -> Range:
    return BOOL


_RELAX: dict[str, Callable[..., Range]] = {
    "subtract": pad_range.subtract,
    "maximum": pad_range.maximum,
    "minimum": pad_range.minimum,
    "power": pad_range.power,
    "negative": pad_range.negative,
    "abs": _absolute,
    "exp": pad_range.exp,
    "sqrt": pad_range.square_root,
    "rsqrt": pad_range.inverse_square_root,
    "square": lambda a: pad_range.maximum(pad_range.multiply(a, a), ZERO),
    "sigmoid": pad_range.sigmoid,
    "log": pad_range.logarithm,
    "tanh": _bounded,
    "erf": _bounded,
    "sin": _bounded,
    "less": pad_range.less,
    "less_equal": pad_range.less_equal,
    "greater": lambda a, b: pad_range.less(b, a),
    "greater_equal": lambda a, b: pad_range.less_equal(b, a),
    "equal": pad_range.equal,
    "not_equal": _not(pad_range.equal),
    "logical_not": pad_range.logical_not,
    "logical_and": _and,
    "logical_or": _or,
    "where": pad_range.choose,
    "nn.relu": _relu,
    "cos": lambda a: Range(-1.0, 1.0) if a.is_finite else ANY,
    "sign": _keeps_sign,
    **dict.fromkeys("floor ceil round trunc".split(), pad_range.rounded),
    **dict.fromkeys("atan nn.gelu nn.gelu_tanh nn.silu".split(), _keeps_zero),
    **dict.fromkeys("isfinite isinf isnan logical_xor".split(), _is_bool),
}
_COMPARES = {
    _RELAX[name]
    for name in "subtract less less_equal greater greater_equal equal not_equal".split()
}
_DIALECT: dict[str, Callable[..., Range]] = {
    **dict.fromkeys("elu mish softshrink".split(), _keeps_zero),
    "log_sigmoid": lambda a: Range(high=0.0) if a.is_finite else ANY,
    "sigmoid_backward": lambda grad, y: (
        ZERO if y.is_zero and grad.is_finite else pad_range.linear_of(grad, y)
    ),
    **dict.fromkeys(
        "gelu_backward silu_backward tanh_backward elu_backward relu_backward "
        "leaky_relu_backward softplus_backward hardtanh_backward hardswish_backward "
        "hardsigmoid_backward mish_backward log_sigmoid_backward shrink_backward "
        "dropout_backward".split(),
        pad_range.linear_of,
    ),
}


def _elementwise(function: Callable[..., Range]) -> Rule:
    def rule(call: PaddedCall) -> PaddedTensor:
        dtype = call.result_dtypes[0]
        if dtype.startswith("uint") or (function is pad_range.divide and "int" in dtype):
            # Numbers wrap around, or are rounded.
            return broadcast(call.operands, pad_range.finite_of, dtype)
        made = broadcast(call.operands, function, dtype)
        if function in _COMPARES:
            made = _with_order(call, made, function)
        return attrs.evolve(made, limit=limit_of_elements(call, made))

    return rule


def _with_order(
    call: PaddedCall, made: PaddedTensor, function: Callable[..., Range]
) -> PaddedTensor:
    """Return the comparison of indices of two axes that are padded alike, as in a causal mask.

    At padding of an axis its index is the larger one, beside data of the other axis.
    """
    if any(one.index_axis is None for one in call.operands):
        return with_order(call, made, function) if function is not pad_range.subtract else made
    places = [
        one.index_axis + len(made.axes) - len(one.axes)
        for one in call.operands
        if one.index_axis is not None
    ]
    last = max(places)
    kinds = [[factor.kind for factor in made.axes[place]] for place in places]
    if places[0] == places[1] or kinds[0] != kinds[1] or len(kinds[0]) != 1:
        return made
    if any(factor.is_open for axis in made.axes for factor in axis):
        return made
    (factor,) = made.axes[last]
    if factor.dimension is None:
        return made
    known, of_first = (
        function(*((_LATER if place == later else ZERO) for place in places))
        for later in (last, min(places))
    )
    axes = list(made.axes)
    axes[last] = (attrs.evolve(factor, pad=known, is_open=True),)
    (first,) = axes[min(places)]
    axes[min(places)] = (attrs.evolve(first, beside=of_first),)
    return made.with_axes(axes)


# An index less that of another axis, as a range beside 0.
_LATER = Range(1.0)


for _name, _function in _RELAX.items():
    rule_for(f"relax.{_name}")(_elementwise(_function))
for _name, _function in _DIALECT.items():
    rule_for(f"amp_ir.{_name}")(_elementwise(_function))


@rule_for("relax.add")
def add(call: PaddedCall) -> PaddedTensor:
    """Add; indices plus 0 are still indices."""
    made = broadcast(call.operands, pad_range.add, call.result_dtypes[0])
    for one, other in (call.operands, call.operands[::-1]):
        if other.data.is_zero and not other.axes and one.index_axis is not None:
            made = made.with_axes(made.axes, index_axis=one.index_axis)
    return attrs.evolve(made, limit=limit_of_elements(call, made))


@rule_for("relax.multiply")
def multiply(call: PaddedCall) -> PaddedTensor:
    """Multiply; the product of a value with itself is not negative."""
    first, second = call.op.reads
    if first == second and call.operands[0].dtype.startswith("float"):
        return call.operands[0].pads_mapped(
            lambda a: pad_range.maximum(pad_range.multiply(a, a), ZERO)
        )
    made = broadcast(call.operands, pad_range.multiply, call.result_dtypes[0])
    return attrs.evolve(made, limit=limit_of_elements(call, made))


@rule_for("relax.divide")
def divide(call: PaddedCall) -> PaddedTensor:
    """Divide. Data are usual numbers: a divisor that has no padding is not 0.

    (Where it is, all data on the axis are infinite or NaN, without padding too.)
    """
    divisor = call.operands[1]
    is_float = call.result_dtypes[0].startswith(("float", "bfloat"))
    quotient = pad_range.divide if is_float else pad_range.divide_integers
    of_data = pad_range.divide_by_usual if is_float else quotient
    made = broadcast(
        call.operands, of_data if not divisor.padded else quotient, call.result_dtypes[0]
    )
    data = of_data(call.operands[0].data, divisor.data)
    return made.with_axes(made.axes, data=data)


@rule_for("relax.astype", "amp_ir.cast")
def cast(call: PaddedCall) -> PaddedTensor:
    """Keep the numbers; what is beyond the range of a low dtype becomes infinite."""
    (source,) = call.operands
    dtype = call.result_dtypes[0]
    if dtype == "bool":
        return source.pads_mapped(pad_range.as_bool, dtype)
    floats = ("float", "bfloat")
    if not source.dtype.startswith(floats) or dtype.startswith(floats):
        keeps = (lambda a: pad_range.stored(a, dtype)) if "int" in dtype else (lambda a: a)
        made = source.pads_mapped(_cast_to_low if dtype == "float16" else keeps, dtype)
    else:
        made = source.pads_mapped(lambda a: pad_range.stored(pad_range.rounded(a), dtype), dtype)
    index = source.index_axis
    if index is not None and not holds_places(dtype, source.axes[index]):
        index = None
    return made.with_axes(
        made.axes,
        index_axis=index,
        is_uniform=source.is_uniform,
        limit=limit_of_elements(call, made),
    )


def _cast_to_low(a: Range) -> Range:
    known = a.constant
    if known is not None and abs(known) > 65504.0:
        return pad_range.constant(float("inf") if known > 0 else float("-inf"))
    return a


@rule_for("amp_ir.softplus")
def softplus(call: PaddedCall) -> PaddedTensor:
    """Compute log(1 + e^(beta x)) / beta, which is 0 where x is hidden, but for a small beta."""
    beta = float(call.option("beta"))
    function = pad_range.softplus if beta >= _LEAST_BETA else _unless_infinite(beta)
    return broadcast(call.operands, function, call.result_dtypes[0])


# e^-1000 is 0 in every dtype.
_LEAST_BETA = 0.1


def _unless_infinite(beta: float) -> Callable[[Range], Range]:
    """Return softplus's range for a small beta: below 1e-30 the quotient by it may be infinite."""
    return lambda a: NOT_NEGATIVE if a.is_finite and beta > 1e-30 else ANY


@rule_for("relax.nn.leakyrelu")
def leaky_relu(call: PaddedCall) -> PaddedTensor:
    """Keep the sign."""
    return broadcast(call.operands, _keeps_sign, call.result_dtypes[0])
