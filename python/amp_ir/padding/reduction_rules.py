# SPDX-License-Identifier: Apache-2.0
"""Padding rules of ops that combine the elements of an axis; those of softmax are beside this."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from amp_ir.padding import pad_range
from amp_ir.padding.axes import Axis, Factor
from amp_ir.padding.limits import limit_of_places, limit_of_sum
from amp_ir.padding.pad_range import ANY, FINITE, NOT_NEGATIVE, ZERO, Range
from amp_ir.padding.padded_call import (
    Leak,
    PaddedCall,
    PaddedTensor,
    aligned,
    require_data,
    require_outermost,
    require_zero,
    rule_for,
)


def _reduced_axes(call: PaddedCall) -> list[int]:
    count = len(call.operands[0].axes)
    given = call.option("axis")
    if given is None:
        return list(range(count))
    values = [given] if isinstance(given, int) or not hasattr(given, "__iter__") else list(given)
    return [int(one) % count for one in values]


def _reduced(call: PaddedCall, axes: list[int], function: Callable[[Range], Range]) -> PaddedTensor:
    source = call.operands[0]
    keeps = bool(call.option("keepdims"))
    kept: list[Axis] = []
    for k, axis in enumerate(source.axes):
        if k in axes:
            kept += [()] if keeps else []
        else:
            kept.append(tuple(one.with_pad(function(one.pad)) for one in axis))
    return call.result(kept, function(source.data))


@rule_for("relax.sum")
def sum_(call: PaddedCall) -> PaddedTensor:
    """Add elements, of which those at padding must be 0."""
    axes = _reduced_axes(call)
    require_zero(call.operands[0], axes, "elements are added")
    made = _reduced(call, axes, pad_range.sum_of)
    return attrs.evolve(made, limit=limit_of_sum(call, axes))


@rule_for("relax.mean")
def mean(call: PaddedCall) -> PaddedTensor:
    """Average elements of axes without padding, which would be counted."""
    axes = _reduced_axes(call)
    require_data(call.operands[0], axes, "elements are averaged over")
    return _reduced(call, axes, lambda a: a if a.is_finite and not a.is_large else ANY)


@rule_for("relax.variance", "relax.std", "relax.prod")
def statistic(call: PaddedCall) -> PaddedTensor:
    """Combine elements of axes without padding."""
    axes = _reduced_axes(call)
    require_data(call.operands[0], axes, "elements are combined over")
    return _reduced(call, axes, lambda a: FINITE if a.is_finite else ANY)


# Integers this far below 0 are no numbers of words or of places.
_HIDDEN_INTEGER = -1e9


def _is_never_chosen(pad: Range, source: PaddedTensor, *, largest: bool) -> bool:
    if pad.has_nan:
        return False
    data = source.data
    pad, data = (pad, data) if largest else (pad_range.negative(pad), pad_range.negative(data))
    is_hidden = pad.high <= _HIDDEN_INTEGER if "int" in source.dtype else pad.is_hidden
    return is_hidden or pad.high <= data.low


def _check_chosen(call: PaddedCall, axes: list[int], *, largest: bool) -> None:
    source = call.operands[0]
    for axis in axes:
        for one in source.axes[axis]:
            if one.is_padded and not _is_never_chosen(one.pad, source, largest=largest):
                raise Leak(
                    f"the {'largest' if largest else 'smallest'} element over "
                    f"{one.name} is taken, where padding may be it"
                )
    rest = [one for k, axis in enumerate(source.axes) if k not in axes for one in axis]
    if source.is_padded_on(axes) and any(one.is_open for one in rest):
        raise Leak("the largest or smallest element is taken where both axes are padding")
    if "arg" in call.op.name:
        merged_axes = len(axes) > 1 and source.is_padded_on(axes[1:])
        if merged_axes:
            raise Leak("the position of an element is taken over several axes, padding between")
        require_outermost(source, axes, "the position of an element is taken over")


@rule_for("relax.max", "relax.argmax")
def maximum(call: PaddedCall) -> PaddedTensor:
    """Take the largest element, which padding must not be."""
    axes = _reduced_axes(call)
    _check_chosen(call, axes, largest=True)
    return _with_limit(call, _reduced(call, axes, _chosen(call)), axes)


@rule_for("relax.min", "relax.argmin")
def minimum(call: PaddedCall) -> PaddedTensor:
    """Take the smallest element, which padding must not be."""
    axes = _reduced_axes(call)
    _check_chosen(call, axes, largest=False)
    return _with_limit(call, _reduced(call, axes, _chosen(call)), axes)


def _with_limit(call: PaddedCall, made: PaddedTensor, axes: list[int]) -> PaddedTensor:
    """Return places of elements, which are places of data."""
    factors = [one for axis in axes for one in call.operands[0].axes[axis]]
    if "arg" not in call.op.name or len(factors) != 1:
        return made
    return attrs.evolve(made, limit=limit_of_places(factors[0]))


def _chosen(call: PaddedCall) -> Callable[[Range], Range]:
    return (lambda _a: NOT_NEGATIVE) if "arg" in call.op.name else (lambda a: a)


@rule_for("relax.cumsum")
def cumsum(call: PaddedCall) -> PaddedTensor:
    """Add up from the front: sums at data do not see padding, which comes after."""
    source = call.operands[0]
    if call.option("axis") is None and len(source.axes) > 1 and source.padded:
        raise Leak("elements of all axes are added up, padding included")
    along = 0 if call.option("axis") is None else call.axis()
    require_outermost(source, [along], "elements are added up along")
    is_reversed = any(one.is_reversed for one in source.axes[along])
    if is_reversed:
        require_zero(source, [along], "elements are added up, padding first,")

    def pad_of(one: Factor, k: int) -> Range:
        if k == along and is_reversed:
            return ZERO
        # At padding elements are added to those of data.
        return pad_range.finite_of(source.everything if k == along else one.pad)

    return source.with_axes(
        [tuple(one.with_pad(pad_of(one, k)) for one in axis) for k, axis in enumerate(source.axes)],
        data=ZERO if source.data.is_zero else pad_range.finite_of(source.data),
        dtype=call.result_dtypes[0],
        is_uniform=False,
        limit=None if is_reversed else limit_of_sum(call, [along]),
    )


@rule_for("relax.matmul")
def matmul(call: PaddedCall) -> PaddedTensor:
    """Multiply matrices; where the inner axis is padded one of both must be 0 there."""
    a, b = call.operands
    if len(a.axes) < 2 or len(b.axes) < 2:
        return _unpadded(call)
    batch = [PaddedTensor(one.axes[:-2], one.data, one.dtype) for one in (a, b)]
    inner = aligned([PaddedTensor((axis,), FINITE, a.dtype) for axis in (a.axes[-1], b.axes[-2])])
    for one, other in zip(inner[0][0] or (), inner[1][0] or (), strict=True):
        if not one.is_padded:
            continue
        if not pad_range.multiply(one.pad, other.pad).is_zero:
            raise Leak(
                f"products are added over {one.name}, where padding is not 0 in either of the two"
            )
    rows = aligned(batch)
    axes: list[Axis] = []
    for column in zip(*rows, strict=True):
        axes.append(_product_axis(column, (a, b)))
    axes.append(tuple(one.with_pad(_product(one.pad, b.everything)) for one in a.axes[-2]))
    axes.append(tuple(one.with_pad(_product(one.pad, a.everything)) for one in b.axes[-1]))
    return call.result(axes, _product(a.data, b.data))


def _product(a: Range, b: Range) -> Range:
    product = pad_range.multiply(a, b)
    return ZERO if product.is_zero else pad_range.finite_of(a, b)


def _product_axis(
    column: tuple[Axis | None, ...], tensors: tuple[PaddedTensor, PaddedTensor]
) -> Axis:
    chosen = next((axis for axis in column if axis), ())
    found = []
    for k, factor in enumerate(chosen):
        pads = [
            tensor.everything if axis is None else axis[k].pad
            for axis, tensor in zip(column, tensors, strict=True)
        ]
        found.append(factor.with_pad(_product(pads[0], pads[1])))
    return tuple(found)


def _unpadded(call: PaddedCall) -> PaddedTensor:
    if any(one.padded for one in call.operands):
        raise Leak("a vector that is padded is multiplied")
    return call.unpadded()[0]
