# SPDX-License-Identifier: Apache-2.0
"""Limits of results: which numbers are below the length without padding, as indices of data are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import attrs

from amp_ir.ir.step_graph import StepGraph, Value
from amp_ir.padding import pad_range
from amp_ir.padding.axes import Dimension, Factor, Limit
from amp_ir.padding.pad_range import Range
from amp_ir.padding.padded_call import PaddedCall, PaddedTensor

# Integers of these dtypes, as large as a length, are stored as they are.
_WIDE = ("int64", "int32", "float32", "float64")
# The numbers up to which others hold each place.
_EXACT = {"float16": 2048, "bfloat16": 256, "int8": 127, "uint8": 255, "int16": 32767}


def holds_places(dtype: str, factors: Iterable[Factor]) -> bool:
    """Return whether a dtype holds each place of an axis as a number of its own."""
    sizes = [(one.size, one.other_size) for one in factors]
    largest = max(math.prod(column) for column in zip(*sizes, strict=True)) if sizes else 1
    return dtype != "bool" and largest <= _EXACT.get(dtype, 2**24)


def lengths_among_constants(
    graph: StepGraph, other: StepGraph, dimensions: Sequence[Dimension]
) -> dict[int, Limit]:
    """Return the constants that are a padded length or differ from it by a number.

    Each is n + shift without padding, as a limit.
    """
    found = {}
    for leaf, (value, other_value) in enumerate(zip(graph.values, other.values, strict=True)):
        if not value.is_constant or value.size != 1 or "int" not in value.dtype:
            continue
        number, other_number = _number(value), _number(other_value)
        for one in dimensions:
            if number - other_number == one.size - one.other_size:
                found[leaf] = Limit(one, number - one.size)
    return found


def _number(value: Value) -> int:
    assert value.expr is not None
    return int(value.expr.value.numpy().item())


def limit_of_sum(call: PaddedCall, axes: Sequence[int]) -> Limit | None:
    """Return the limit of a sum of numbers from 0 to 1: there are no more than data."""
    (source,) = call.operands
    factors = [one for axis in axes for one in source.axes[axis]]
    if len(factors) != 1 or call.result_dtypes[0] not in _WIDE:
        return None
    is_at_most_1 = source.data.low >= 0.0 and source.data.high <= 1.0
    return limit_of_places(factors[0], past=1) if is_at_most_1 else None


def limit_of_places(factor: Factor, past: int = 0) -> Limit | None:
    """Return the limit of places of data on a padded factor, up to some past the last."""
    if factor.dimension is None:
        return None
    return Limit(factor.dimension, factor.shift + past)


def limit_of_elements(call: PaddedCall, made: PaddedTensor) -> Limit | None:
    """Return the limit of an op that computes each element from those at the same place."""
    if call.result_dtypes[0] not in _WIDE or not any(one.limit for one in call.operands):
        return None
    function = _LIMITS.get(call.op.name)
    # A number far below 0 may wrap around.
    if function is None or (call.result_dtypes[0] == "int32" and made.data.low == -math.inf):
        return None
    return function(call, *call.operands)


def _of_sum(_call: PaddedCall, a: PaddedTensor, b: PaddedTensor) -> Limit | None:
    one, other = (a, b) if a.limit is not None else (b, a)
    return _moved(one, other.data.high)


def _of_difference(_call: PaddedCall, a: PaddedTensor, b: PaddedTensor) -> Limit | None:
    return _moved(a, -b.data.low)


def _moved(tensor: PaddedTensor, distance: float) -> Limit | None:
    if tensor.limit is None or math.isinf(distance):
        return None
    return tensor.limit.moved(math.ceil(distance))


def _of_product(_call: PaddedCall, a: PaddedTensor, b: PaddedTensor) -> Limit | None:
    """Return the limit of numbers times a mask: they, or 0."""
    one, other = (a, b) if a.limit is not None else (b, a)
    is_mask = other.data.low >= 0.0 and other.data.high <= 1.0
    return one.limit if is_mask and one.limit is not None and one.limit.shift >= 0 else None


def _of_minimum(_call: PaddedCall, a: PaddedTensor, b: PaddedTensor) -> Limit | None:
    return a.limit or b.limit


def _of_maximum(call: PaddedCall, a: PaddedTensor, b: PaddedTensor) -> Limit | None:
    """Return the limit of numbers, or a number that no length is below."""
    one, other = (a, b) if a.limit is not None else (b, a)
    if one.limit is None or math.isinf(other.data.high):
        return None
    call.require_size(one.limit.dimension, math.floor(other.data.high) + 1 - one.limit.shift)
    return one.limit


def _of_choice(
    call: PaddedCall, _condition: PaddedTensor, a: PaddedTensor, b: PaddedTensor
) -> Limit | None:
    """Return the limit of either, or of one and a number that no length is below, such as -100."""
    if a.limit is None or b.limit is None:
        return _of_maximum(call, a, b)
    if a.limit.dimension != b.limit.dimension:
        return None
    return max(a.limit, b.limit, key=lambda one: one.shift)


def _of_cast(_call: PaddedCall, a: PaddedTensor) -> Limit | None:
    is_kept = a.data.low >= 0.0 or a.dtype == "int32"
    is_kept = is_kept or (a.dtype == "int64" and _call.result_dtypes[0] != "int32")
    return a.limit if is_kept else None


_LIMITS: dict[str, Callable[..., Limit | None]] = {
    "relax.add": _of_sum,
    "relax.subtract": _of_difference,
    "relax.multiply": _of_product,
    "relax.minimum": _of_minimum,
    "relax.maximum": _of_maximum,
    "relax.where": _of_choice,
    "relax.astype": _of_cast,
    "amp_ir.cast": _of_cast,
}


def with_order(
    call: PaddedCall, made: PaddedTensor, function: Callable[[Range, Range], Range]
) -> PaddedTensor:
    """Return the comparison of indices with numbers below the length, such as lengths.

    At padding an index is n or more, so that `index < length` is false there.
    """
    if any(factor.is_open for axis in made.axes for factor in axis):
        return made
    for position, one in enumerate(call.operands):
        other = call.operands[1 - position]
        if one.index_axis is None or other.dtype == "bool":
            continue
        place = one.index_axis + len(made.axes) - len(one.axes)
        at = place - len(made.axes) + len(other.axes)
        if len(made.axes[place]) != 1 or (at >= 0 and other.axes[at]):
            continue
        found = _compared(call, function, made.axes[place][0], 1 - position)
        if found is not None:
            axes = list(made.axes)
            axes[place] = (found,)
            return made.with_axes(axes)
    return made


def _compared(
    call: PaddedCall, function: Callable[[Range, Range], Range], factor: Factor, position: int
) -> Factor | None:
    """Return a factor with what is known of indices there beside numbers of an operand."""
    if factor.dimension is None:
        return None
    for past in (1, 0):
        # Both less n + shift.
        known = Range(0.0), Range(high=past - 1.0)
        found = function(*(known if position else known[::-1]))
        limit = Limit(factor.dimension, factor.shift + past)
        if found.constant is None or not call.are_inside(position, limit, None):
            continue
        # Numbers at padding of other axes may be as large as those of data, or not above 0.
        pads = [one.pad for one in call.operands[position].padded]
        is_open = factor.shift < 0 or any(one.has_nan or one.high > past for one in pads)
        return attrs.evolve(factor, pad=pad_range.stored(found, "bool"), is_open=is_open)
    return None
