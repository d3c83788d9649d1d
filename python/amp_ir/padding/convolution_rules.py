# SPDX-License-Identifier: Apache-2.0
"""Padding rules of convolutions: tensors are [samples, channels, *space].

Each sample is computed by itself. In space a window that reaches past the data reads what it reads
past the end without padding: 0, where the padding is 0 too. So it is with a step of 1; with a
larger one the result is no longer as long as the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from amp_ir.dialect.registry import options_of
from amp_ir.padding import pad_range
from amp_ir.padding.axes import Axis, padded, plain
from amp_ir.padding.pad_range import FINITE, ZERO, Range
from amp_ir.padding.padded_call import (
    Leak,
    PaddedCall,
    PaddedTensor,
    aligned,
    require_data,
    require_zero,
    rule_for,
)


@rule_for("amp_ir.conv")
def convolution(call: PaddedCall) -> PaddedTensor:
    """Convolve with the same windows everywhere."""
    x, weight = call.operands
    window = _window_of(weight)
    for k in _padded_space(call, [x]):
        _require_zeros_read(call, x, k)
    known = _known(x, weight)
    space = [_moved(call, k, axis, window, 1, known) for k, axis in enumerate(x.axes[2:])]
    return _result(call, _samples(x, weight), space)


@rule_for("amp_ir.conv_backward_input")
def convolution_backward_input(call: PaddedCall) -> PaddedTensor:
    """Spread each gradient over its window; those of padding must be 0."""
    grad, weight = call.operands
    window = _window_of(weight)
    for k in _padded_space(call, [grad]):
        require_zero(grad, [k + 2], "gradients are spread over windows")
    known = _known(grad, weight)
    space = []
    for k, axis in enumerate(grad.axes[2:]):
        # Without zeros around the data no window reaches beyond them.
        is_apart = _numbers(call, "padding")[k] == 0 and known.is_finite
        space.append(_moved(call, k, axis, window, -1, ZERO if is_apart else known))
    return _result(call, _samples(grad, weight), space)


@rule_for("amp_ir.conv_backward_weight")
def convolution_backward_weight(call: PaddedCall) -> PaddedTensor:
    """Add products; the gradient of padding must be 0, and what else a window reads there."""
    grad, x = call.operands
    _known(grad, x)
    samples = aligned([PaddedTensor(one.axes[:1], FINITE, one.dtype) for one in (grad, x)])
    for one, other in zip(samples[0][0] or (), samples[1][0] or (), strict=True):
        if one.is_padded and not pad_range.multiply(one.pad, other.pad).is_zero:
            raise Leak(
                f"products are added over {one.name}, where padding is not 0 in either of the two"
            )
    window = [size for size, _ in call.result_sizes[0][2:]]
    for k in _padded_space(call, [grad, x]):
        _require_zeros_read(call, x, k)
        require_zero(grad, [k + 2], "gradients of a window are added")
        moved = _moved(call, k, x.axes[k + 2], window, 1, FINITE) or ()
        if [one.kind for one in moved] != [one.kind for one in grad.axes[k + 2]]:
            raise Leak("gradients of windows are padded otherwise than what they read")
    return call.unpadded()[0]


def _window_of(weight: PaddedTensor) -> list[int]:
    """Return the extents of a window in space."""
    require_data(weight, range(len(weight.axes)), "each sample is computed with all of")
    return [_extent(axis) for axis in weight.axes[2:]]


def _extent(axis: Axis) -> int:
    return axis[0].size if axis else 1


def _padded_space(call: PaddedCall, tensors: Sequence[PaddedTensor]) -> Iterator[int]:
    """Yield the axes in space that are padded, counted without samples and channels.

    Raises:
        Leak: channels are padded, or an axis in a way that no rule is for, or windows leave
            entries out, so that no result is as long as the data.
    """
    for one in tensors:
        require_data(one, [1], "elements are mixed over")
    for k in range(len(tensors[0].axes) - 2):
        if not any(one.is_padded_on([k + 2]) for one in tensors):
            continue
        for one in tensors:
            if any(factor.is_open for factor in one.factors):
                raise Leak("a tensor that is masked where two axes are padding is convolved")
            if len(one.axes[k + 2]) != 1 or one.axes[k + 2][0].dimension is None:
                raise Leak("elements are mixed over an axis that padding is merged into")
        stride = _numbers(call, "strides")[k]
        if stride != 1:
            name = tensors[0].axes[k + 2][0].name
            raise Leak(
                f"windows over {name} advance by {stride}, so that their number is no longer the "
                "length, or one that differs from it by the same everywhere. Use strides of 1, or "
                "do not pad this axis"
            )
        yield k


def _require_zeros_read(call: PaddedCall, x: PaddedTensor, k: int) -> None:
    """Require that windows read 0 at padding, where they reach past the data.

    Raises:
        Leak: they may read something else.
    """
    (factor,) = x.axes[k + 2]
    if _numbers(call, "padding")[k] and not factor.pad.is_zero:
        raise Leak(
            f"windows reach over the end of {factor.name}, where padding is not 0: multiply what "
            "is convolved by the mask"
        )


def _moved(
    call: PaddedCall, k: int, axis: Axis, window: Sequence[int], sign: int, known: Range
) -> Axis | None:
    """Return a padded axis after a convolution (1), or before it (-1); None for one of data."""
    if not any(one.is_padded for one in axis):
        return None
    (factor,) = axis
    assert factor.dimension is not None
    padding, dilation = (_numbers(call, name)[k] for name in ("padding", "dilation"))
    shift = factor.shift + sign * (2 * padding - dilation * (window[k] - 1))
    call.require_size(factor.dimension, 1 - shift)
    return (padded(factor.dimension, shift, known),)


def _known(x: PaddedTensor, other: PaddedTensor) -> Range:
    """Return what is known of products of two tensors.

    Raises:
        Leak: they may be infinite or NaN in padding of space, which libraries compute with.
    """
    known = pad_range.finite_of(x.everything, other.everything)
    is_padded = any(one.is_padded_on(range(2, len(one.axes))) for one in (x, other))
    if is_padded and not known.is_finite:
        raise Leak("padding may be infinite or NaN, where windows of data are computed beside it")
    return known


def _samples(x: PaddedTensor, weight: PaddedTensor) -> Axis:
    """Return the axis of the samples of a function that is linear in each."""
    return tuple(one.with_pad(pad_range.linear_of(one.pad, weight.everything)) for one in x.axes[0])


def _result(call: PaddedCall, samples: Axis, space: Sequence[Axis | None]) -> PaddedTensor:
    sizes = call.result_sizes[0]
    rest = [
        plain(size) if axis is None else axis
        for axis, (size, _) in zip(space, sizes[2:], strict=True)
    ]
    return call.result([samples, plain(sizes[1][0]), *rest])


def _numbers(call: PaddedCall, name: str) -> list[int]:
    given: Any = options_of(call.op.call)[name]
    return [int(one) for one in given]
