# SPDX-License-Identifier: Apache-2.0
"""Compute the range of an op's result from those of its arguments: one rule per op."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
from tvm import relax

from amp_ir.dialect.registry import options_of
from amp_ir.ir.dataflow import op_name
from amp_ir.ir.static_shape import shape_of
from amp_ir.rewrites.ranges.number_range import (
    BOOLEAN,
    COMPARISONS,
    FALSE,
    OPPOSITE,
    TRUE,
    Range,
    dtype_of,
    is_integer,
    join_all,
    limited,
)


@attrs.frozen(eq=False)
class Operands:
    """One call whose range is asked for; `range_of` gives that of an expression."""

    call: relax.Call
    range_of: Callable[[relax.Expr], Range | None]

    def of(self, position: int) -> Range | None:
        """Return the range of an argument."""
        return self.range_of(self.call.args[position])

    @property
    def is_float(self) -> bool:
        """Return whether the result is a float."""
        return "float" in dtype_of(self.call)


Rule = Callable[[Operands], "Range | None"]


def _same(asked: Operands) -> Range | None:
    return asked.of(0)


def _concat(asked: Operands) -> Range | None:
    given = asked.call.args[0]
    parts = given.fields if isinstance(given, relax.Tuple) else [given]
    return join_all([asked.range_of(part) for part in parts])


def _corners(function: Callable[[Any, Any], Any]) -> Rule:
    """Return the range of an op of two numbers, monotone in each where the other is fixed."""

    def rule(asked: Operands) -> Range | None:
        a, b = asked.of(0), asked.of(1)
        if a is None or b is None or (asked.is_float and not _is_wide(asked.call)):
            return None
        found = [_rounded(function(x, y), asked) for x in (a.low, a.high) for y in (b.low, b.high)]
        return Range(min(low for low, _ in found), max(high for _, high in found))

    return rule


def _is_wide(call: relax.Call) -> bool:
    return dtype_of(call) in ("float32", "float64")


def _rounded(number: Any, asked: Operands) -> tuple[Any, Any]:
    """Return a result; for a float32, the range between the result and its rounded value."""
    if not asked.is_float or dtype_of(asked.call) == "float64":
        return number, number
    with np.errstate(over="ignore"):
        stored = float(np.float32(number))
    return min(number, stored), max(number, stored)


def _mapped(function: Callable[[Range], Range]) -> Rule:
    def rule(asked: Operands) -> Range | None:
        x = asked.of(0)
        return None if x is None else function(x)

    return rule


def _absolute(x: Range) -> Range:
    least = 0 if x.low <= 0 <= x.high else min(abs(x.low), abs(x.high))
    return Range(least, max(abs(x.low), abs(x.high)))


def _modulo(asked: Operands) -> Range | None:
    """Bound the result by the divisor, and by the number itself where that is not negative."""
    x, y = asked.of(0), asked.of(1)
    if x is None or y is None or asked.is_float or y.low <= 0:
        return None
    # Floor or truncation agree from 0 on, and elsewhere the result may have either sign.
    if x.low >= 0:
        return Range(0, min(y.high - 1, x.high))
    return Range(1 - y.high, y.high - 1)


def _floor_mod(asked: Operands) -> Range | None:
    x, y = asked.of(0), asked.of(1)
    if x is None or y is None or asked.is_float or y.low <= 0:
        return None
    if x.low >= 0:
        return Range(0, min(y.high - 1, x.high))
    return Range(0, y.high - 1)


def _floor_divide(asked: Operands) -> Range | None:
    x, y = asked.of(0), asked.of(1)
    if x is None or y is None or asked.is_float or y.low <= 0:
        return None
    found = [a // b for a in (x.low, x.high) for b in (y.low, y.high)]
    return Range(min(found), max(found))


def _right_shift(asked: Operands) -> Range | None:
    x, y = asked.of(0), asked.of(1)
    if x is None or y is None or y.low < 0 or y.high > 63:
        return None
    found = [int(a) >> int(b) for a in (x.low, x.high) for b in (y.low, y.high)]
    return Range(min(found), max(found))


def _bitwise_and(asked: Operands) -> Range | None:
    x, y = asked.of(0), asked.of(1)
    bounds = [one.high for one in (x, y) if one is not None and one.low >= 0]
    return Range(0, min(bounds)) if bounds else None


def _cast(asked: Operands) -> Range | None:
    x, source = asked.of(0), asked.call.args[0]
    if x is None:
        return None
    if asked.is_float:
        # Rounding is monotone, and a low dtype overflows to a value that is not finite.
        if not _is_wide(asked.call):
            return None
        lows, highs = _rounded(x.low, asked), _rounded(x.high, asked)
        return Range(lows[0], highs[1])
    if "float" in dtype_of(source):
        return Range(math.trunc(x.low), math.trunc(x.high))
    return x


def _position(asked: Operands) -> Range | None:
    axis, shape = asked.call.attrs.axis, shape_of(asked.call.args[0])
    return Range(0, (math.prod(shape) if axis is None else shape[int(axis)]) - 1)


def _arange(asked: Operands) -> Range | None:
    begin, _, step = (int(one.value) for one in asked.call.args)
    count = math.prod(shape_of(asked.call))
    return Range(begin, begin + step * max(0, count - 1)) if count and step > 0 else None


def _full(asked: Operands) -> Range | None:
    return asked.of(1)


def _summed(count: Callable[[relax.Call], int]) -> Rule:
    def rule(asked: Operands) -> Range | None:
        x = asked.of(0)
        if x is None or asked.is_float:
            return None
        terms = count(asked.call)
        return Range(min(x.low, x.low * terms), max(x.high, x.high * terms))

    return rule


def _terms_of_sum(call: relax.Call) -> int:
    return math.prod(shape_of(call.args[0])) // max(1, math.prod(shape_of(call)))


def _terms_of_scan(call: relax.Call) -> int:
    shape, axis = shape_of(call.args[0]), call.attrs.axis
    return math.prod(shape) if axis is None else shape[int(axis)]


def _written(asked: Operands) -> Range | None:
    """Return the range of the old and the written values together."""
    options = options_of(asked.call)
    if op_name(asked.call) == "amp_ir.index_put":
        return None if options["accumulate"] else join_all([asked.of(0), asked.of(1)])
    is_update = str(asked.call.attrs.reduction) in ("update", "min", "max")
    return join_all([asked.of(0), asked.of(2)]) if is_update else None


def _pooled_place(asked: Operands) -> Range | None:
    options, shape = options_of(asked.call), shape_of(asked.call.args[0])
    rank = len(options["kernel"] if "kernel" in options else options["output_size"])
    return Range(0, math.prod(shape[len(shape) - rank :]) - 1)


def _compared(relation: str) -> Rule:
    """Return the range of a comparison, which may always or never hold for these ranges."""

    def rule(asked: Operands) -> Range | None:
        x, y = asked.of(0), asked.of(1)
        if x is None or y is None or not all(map(is_integer, asked.call.args)):
            return BOOLEAN
        if x.meet(limited(relation, y)) is None:
            return FALSE
        return TRUE if x.meet(limited(OPPOSITE[relation], y)) is None else BOOLEAN

    return rule


def _uniform(_asked: Operands) -> Range | None:
    return Range(0.0, 1.0 - 2.0**-24)


RULES: dict[str, Rule] = {
    **{
        f"relax.{name}": _same
        for name in (
            "reshape permute_dims broadcast_to strided_slice flip take gather_elements max min sort"
        ).split()
    },
    "amp_ir.index": _same,
    "amp_ir.embedding": _same,
    "relax.tril": lambda asked: join_all([asked.of(0), Range(0, 0)]),
    "relax.triu": lambda asked: join_all([asked.of(0), Range(0, 0)]),
    "relax.concat": _concat,
    "relax.add": _corners(lambda a, b: a + b),
    "relax.subtract": _corners(lambda a, b: a - b),
    "relax.multiply": _corners(lambda a, b: a * b),
    "relax.maximum": _corners(max),
    "relax.minimum": _corners(min),
    "relax.negative": _mapped(lambda x: Range(-x.high, -x.low)),
    "relax.abs": _mapped(_absolute),
    "relax.floor": _mapped(lambda x: Range(math.floor(x.low), math.floor(x.high))),
    "relax.ceil": _mapped(lambda x: Range(math.ceil(x.low), math.ceil(x.high))),
    "relax.round": _mapped(lambda x: Range(math.floor(x.low), math.ceil(x.high))),
    "relax.trunc": _mapped(lambda x: Range(math.trunc(x.low), math.trunc(x.high))),
    "relax.sign": lambda asked: None if asked.is_float else Range(-1, 1),
    "relax.mod": _modulo,
    "relax.floor_mod": _floor_mod,
    "relax.floor_divide": _floor_divide,
    "relax.right_shift": _right_shift,
    "relax.bitwise_and": _bitwise_and,
    "relax.astype": _cast,
    "amp_ir.cast": _cast,
    "relax.argmax": _position,
    "relax.argmin": _position,
    "relax.argsort": _position,
    "relax.arange": _arange,
    "relax.full": _full,
    "relax.sum": _summed(_terms_of_sum),
    "relax.cumsum": _summed(_terms_of_scan),
    "amp_ir.index_put": _written,
    "relax.scatter_elements": _written,
    "amp_ir.random_uniform": _uniform,
    **{name: _compared(relation) for name, relation in COMPARISONS.items()},
    "relax.logical_not": _mapped(lambda x: Range(1 - x.high, 1 - x.low)),
    "relax.logical_and": _corners(min),
    "relax.logical_or": _corners(max),
}

# Element i of the result depends on elements i of the arguments alone, broadcast as NumPy does: so
# a fact about an element under a condition carries through the op.
POINTWISE = {
    "amp_ir.cast",
    *COMPARISONS,
    *(
        f"relax.{name}"
        for name in (
            "add subtract multiply maximum minimum negative abs floor ceil round trunc sign mod "
            "floor_mod floor_divide right_shift bitwise_and where astype broadcast_to "
            "logical_not logical_and logical_or"
        ).split()
    ),
}

# Of ops with several results: (op, which) -> rule.
FIELD_RULES: dict[tuple[str, int], Rule] = {
    ("relax.topk", 0): _same,
    ("relax.topk", 1): _position,
    ("amp_ir.max_pool", 1): _pooled_place,
    ("amp_ir.adaptive_max_pool", 1): _pooled_place,
}
