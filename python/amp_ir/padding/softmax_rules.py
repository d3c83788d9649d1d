# SPDX-License-Identifier: Apache-2.0
"""Padding rules of softmax: over a padded axis a mask must hide padding."""

from __future__ import annotations

from math import inf

import attrs

from amp_ir.padding import pad_range
from amp_ir.padding.axes import Axis, Factor
from amp_ir.padding.pad_range import ANY, FINITE, ZERO, Range
from amp_ir.padding.padded_call import Leak, PaddedCall, PaddedTensor, aligned, rule_for

_LARGEST_FLOAT16 = 65504.0


@rule_for("relax.nn.softmax", "relax.nn.log_softmax")
def softmax(call: PaddedCall) -> PaddedTensor:
    """Normalize an axis; where it is padded, numbers there must be hidden by a mask."""
    (source,) = call.operands
    along = call.axis()
    is_log = call.op.name.endswith("log_softmax")
    for one in source.axes[along]:
        if one.is_padded and not one.pad.is_hidden:
            raise Leak(f"softmax over {one.name} gives padding a weight: no mask hides it")
    axes = [
        tuple(
            one.with_pad(_of_hidden(one.pad, is_log) if k == along else _of_row(one, is_log))
            for one in axis
        )
        for k, axis in enumerate(source.axes)
    ]
    rest = [one for k, axis in enumerate(source.axes) if k != along for one in axis]
    if any(one.is_padded and one.pad.may_mask and one.pad.is_masked for one in rest):
        axes[along] = tuple(attrs.evolve(one, is_open=one.is_padded) for one in axes[along])
    if any(one.pad.has_nan for axis in axes for one in axis) and source.is_padded_on([along]):
        raise Leak(
            "softmax of a row of padding in which everything is masked is NaN. Mask only what "
            "each row does not see, with -1e4, which is no infinity in float16 either, or use "
            "scaled_dot_product_attention, of which such a row is 0"
        )
    return call.result(axes, _of_numbers(source.data, is_log))


def _of_numbers(a: Range, is_log: bool) -> Range:
    if not is_log:
        return pad_range.BOOL
    return Range(high=0.0, has_minus_inf=a.has_minus_inf, is_masked=a.is_masked)


def _of_hidden(a: Range, is_log: bool) -> Range:
    """Return the range of what a mask hides: no weight, whose logarithm is as far below 0."""
    if not is_log:
        return ZERO
    return a if a.constant == -inf else attrs.evolve(_of_numbers(a, is_log), is_offset=True)


def _of_row(one: Factor, is_log: bool) -> Range:
    """Return the range of a row of padding."""
    a = one.pad
    # A row of -inf is NaN, and so may be one of numbers that are -inf in float16.
    is_inf = a.high == -inf or (a.has_minus_inf and a.is_masked)
    if one.beside is not None and one.beside.is_usual and not one.beside.is_hidden:
        is_inf = False  # it sees data, as rows of padding do by a causal mask
    if a.has_nan or a.has_plus_inf or is_inf or (a.is_hidden and a.low < -_LARGEST_FLOAT16):
        return ANY
    return _of_numbers(a, is_log)


@rule_for("amp_ir.softmax_backward", "amp_ir.log_softmax_backward")
def softmax_backward(call: PaddedCall) -> PaddedTensor:
    """Apply a form linear in the gradient; the weight of padding must be 0."""
    grad, y = call.operands
    along = call.axis()
    aligned([grad, y])
    is_log = "log" in call.op.name
    for one, weight in zip(grad.axes[along], y.axes[along], strict=True):
        if not one.is_padded:
            continue
        # The weight is e to the power of y after log_softmax, and gradients are added up.
        has_no_weight = one.pad.is_zero and weight.pad.is_hidden
        if not (has_no_weight if is_log else pad_range.multiply(weight.pad, one.pad).is_zero):
            raise Leak(f"the gradient of softmax over {one.name} sees padding")
    axes: list[Axis] = []
    for k, (axis, other) in enumerate(zip(grad.axes, y.axes, strict=True)):
        row = []
        for one, weight in zip(axis, other, strict=True):
            # e to the power of -inf is 0.
            is_finite = weight.pad.is_finite or (
                is_log and not (weight.pad.has_nan or weight.pad.has_plus_inf)
            )
            is_zero = k == along or (one.pad.is_zero and is_finite)
            finite = one.pad.is_finite and is_finite
            known = one.with_pad(ZERO if is_zero else FINITE if finite else ANY)
            row.append(attrs.evolve(known, is_open=one.is_open or weight.is_open))
        axes.append(tuple(row))
    return call.result(axes)
