# SPDX-License-Identifier: Apache-2.0
"""Padding rules of layers that compute each sample of a batch by itself; samples come first.

Pooling and group normalization mix the other axes, in which nothing may be padded.
"""

from __future__ import annotations

from collections.abc import Sequence

from amp_ir.padding import pad_range
from amp_ir.padding.axes import Axis, plain
from amp_ir.padding.pad_range import FINITE, NOT_NEGATIVE, ZERO, Range
from amp_ir.padding.padded_call import (
    Leak,
    PaddedCall,
    PaddedTensor,
    aligned,
    require_data,
    require_zero,
    rule_for,
)


def _samples(tensors: Sequence[PaddedTensor]) -> list[Axis]:
    """Return the samples' axis of each tensor.

    Raises:
        Leak: another axis is padded, or the tensors have other samples.
    """
    for one in tensors:
        require_data(one, range(1, len(one.axes)), "elements are mixed over")
    aligned([PaddedTensor(one.axes[:1], one.data, one.dtype) for one in tensors])
    return [one.axes[0] for one in tensors]


def _mixed(tensors: Sequence[PaddedTensor], *weights: PaddedTensor) -> Axis:
    """Return the samples' axis of any finite function of each sample."""
    first, *others = _samples(tensors)
    rest = [one.everything for one in weights]
    return tuple(
        factor.with_pad(pad_range.finite_of(factor.pad, *(axis[k].pad for axis in others), *rest))
        for k, factor in enumerate(first)
    )


def _linear(x: PaddedTensor, others: Sequence[PaddedTensor], *weights: PaddedTensor) -> Axis:
    """Return the samples' axis of a function that is linear in each sample of x."""
    made = _mixed([x, *others], *weights)
    return tuple(
        factor.with_pad(ZERO) if own.pad.is_zero and factor.pad.is_finite else factor
        for factor, own in zip(made, x.axes[0], strict=True)
    )


def _result(
    call: PaddedCall, samples: Axis, position: int = 0, data: Range = FINITE
) -> PaddedTensor:
    """Return a result with the samples first, and nothing else padded.

    Raises:
        Leak: an extent of it follows the padded length.
    """
    others = call.result_sizes[position][1:]
    if any(size != other for size, other in others):
        raise Leak("an extent of the result follows the padded length")
    return call.result([samples, *(plain(size) for size, _ in others)], data, position)


def _require_unpadded(weights: Sequence[PaddedTensor]) -> None:
    for one in weights:
        require_data(one, range(len(one.axes)), "each sample is computed with all of")


@rule_for("amp_ir.conv_transpose")
def transposed_convolution(call: PaddedCall) -> PaddedTensor:
    """Convolve each sample with the same windows; zeros give zeros."""
    x, weight = call.operands
    _require_unpadded([weight])
    return _result(call, _linear(x, [], weight))


@rule_for("amp_ir.avg_pool", "amp_ir.adaptive_avg_pool")
def average_pool(call: PaddedCall) -> PaddedTensor:
    """Average windows of each sample."""
    return _result(call, _linear(call.operands[0], []))


@rule_for("amp_ir.max_pool", "amp_ir.adaptive_max_pool")
def maximum_pool(call: PaddedCall) -> list[PaddedTensor]:
    """Take the largest element of each window, and its place."""
    samples = _linear(call.operands[0], [])
    places = tuple(factor.with_pad(NOT_NEGATIVE) for factor in samples)
    return [_result(call, samples), _result(call, places, 1, NOT_NEGATIVE)]


@rule_for(
    "amp_ir.max_pool_backward",
    "amp_ir.adaptive_max_pool_backward",
    "amp_ir.avg_pool_backward",
    "amp_ir.adaptive_avg_pool_backward",
)
def pool_backward(call: PaddedCall) -> PaddedTensor:
    """Spread the gradient of each window over its sample."""
    grad, *places = call.operands
    return _result(call, _linear(grad, places))


@rule_for("amp_ir.group_norm")
def group_norm(call: PaddedCall) -> list[PaddedTensor]:
    """Normalize groups of channels of each sample; those of padding stay finite."""
    x, *weights = call.operands
    _require_unpadded(weights)
    if not float(call.option("eps")) > 0:
        raise Leak("eps is 0, so that a sample of padding may divide by 0")
    statistic = _mixed([x])
    inverse = tuple(
        factor.with_pad(NOT_NEGATIVE) if factor.pad.is_finite else factor for factor in statistic
    )
    return [
        _result(call, _mixed([x], *weights)),
        _result(call, statistic, 1),
        _result(call, inverse, 2, NOT_NEGATIVE),
    ]


@rule_for("amp_ir.group_norm_backward_input")
def group_norm_backward_input(call: PaddedCall) -> PaddedTensor:
    """Apply a form that is linear in each sample's gradient."""
    grad, x, mean, inverse, *weights = call.operands
    _require_unpadded(weights)
    return _result(call, _linear(grad, [x, mean, inverse], *weights))


@rule_for("amp_ir.group_norm_backward_weight")
def group_norm_backward_weight(call: PaddedCall) -> list[PaddedTensor]:
    """Add the gradients of samples; those of padding must be 0."""
    grad, *others = call.operands
    made = _linear(grad, others)
    require_zero(
        PaddedTensor((made,), FINITE, grad.dtype), [0], "gradients of a normalization are added"
    )
    return call.unpadded()
