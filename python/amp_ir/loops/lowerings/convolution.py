# SPDX-License-Identifier: Apache-2.0
"""Convolutions as plain reductions: correct and slow; dispatch prefers a library.

Each is a sum over an index space [*result, *summed]. Along a spatial axis, output o and window
place k meet at input o * stride + k * dilation - pad.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
from tvm import tirx

from amp_ir.loops import math as m
from amp_ir.loops.body_context import let
from amp_ir.loops.builders import pointwise, reduce, reshape
from amp_ir.loops.ir import Value, compute_dtype
from amp_ir.loops.lowering_registry import Lowering, lowers


def _number(value: int) -> Any:
    return tirx.const(value, "int32")


@attrs.frozen
class _Geometry:
    """The window of a convolution; `space` and `out_space` are the extents on its two sides."""

    space: Sequence[int]
    out_space: Sequence[int]
    strides: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    def inputs(self, outs: Sequence[Any], places: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the input positions, clamped, and whether each of them was in range."""
        at, valid = [], []
        for d, (o, k) in enumerate(zip(outs, places, strict=True)):
            one = let(o * self.strides[d] + k * self.dilation[d] - _number(self.padding[d]))
            at.append(m.clamp(one, self.space[d]))
            valid.append(m.inside(one, self.space[d]))
        return at, valid

    def outputs(self, inputs: Sequence[Any], places: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the output positions, clamped, and whether there is such an output."""
        at, valid = [], []
        for d, (i, k) in enumerate(zip(inputs, places, strict=True)):
            steps = let(i + _number(self.padding[d]) - k * self.dilation[d])
            stride = _number(self.strides[d])
            one = let(tirx.floordiv(steps, stride))
            at.append(m.clamp(one, self.out_space[d]))
            valid.append(m.inside(one, self.out_space[d]))
            valid.append(tirx.floormod(steps, stride) == _number(0))
        return at, valid


def _summed(
    op: Lowering, summed: Sequence[int], dtype: str, body: Callable[[Any, Any], tuple[Any, Any]]
) -> Value:
    """Sum `body(place in the result, place in summed)` over `summed`.

    `body` returns an element and the conditions under which it counts.
    """
    result = op.results[0]
    ndim = len(result.shape)
    space = (*result.shape, *summed)

    def element(*i: Any) -> Any:
        value, valid = body(i[:ndim], i[ndim:])
        return m.select(tirx.all(*valid), value, m.constant(0.0, dtype))

    total = reduce("sum", space, range(ndim, len(space)), element, dtype)
    rounded = pointwise(total.shape, result.dtype, lambda *i: total[i])
    return reshape(rounded, result.shape)


@lowers("amp_ir.conv")
def conv(
    op: Lowering,
    x: Value,
    weight: Value,
    *,
    groups: int = 1,
    out_dtype: str | None = None,
    **window: Sequence[int],
) -> Value:
    """Sum over [input channels per group, *window]."""
    geometry = _Geometry(x.shape[2:], op.results[0].shape[2:], **window)
    out_channels, channels = weight.shape[0] // groups, weight.shape[1]

    def body(i: Any, s: Any) -> tuple[Any, Any]:
        (n, o, *outs), (c, *places) = i, s
        at, valid = geometry.inputs(outs, places)
        channel = tirx.floordiv(o, _number(out_channels)) * channels + c
        return x[(n, channel, *at)] * weight[(o, c, *places)], valid

    return _summed(op, (channels, *weight.shape[2:]), compute_dtype(x.dtype), body)


@lowers("amp_ir.conv_backward_input", "amp_ir.conv_transpose")
def conv_transpose(
    op: Lowering,
    x: Value,
    weight: Value,
    *,
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    **_result: Any,
) -> Value:
    """Sum over [x's channels per group, *window]; x may be the gradient of a convolution."""
    geometry = _Geometry(op.results[0].shape[2:], x.shape[2:], strides, padding, dilation)
    in_channels, channels = weight.shape[0] // groups, weight.shape[1]

    def body(i: Any, s: Any) -> tuple[Any, Any]:
        (n, c, *outputs), (k, *places) = i, s
        at, valid = geometry.outputs(outputs, places)
        channel = tirx.floordiv(c, _number(channels)) * in_channels + k
        inner = tirx.floormod(c, _number(channels))
        return x[(n, channel, *at)] * weight[(channel, inner, *places)], valid

    return _summed(op, (in_channels, *weight.shape[2:]), compute_dtype(x.dtype), body)


@lowers("amp_ir.conv_backward_weight")
def conv_backward_weight(
    op: Lowering,
    grad: Value,
    x: Value,
    *,
    weight_shape: Sequence[int],
    groups: int = 1,
    out_dtype: str | None = None,
    **window: Sequence[int],
) -> Value:
    """Sum over [batch, *out_space]."""
    geometry = _Geometry(x.shape[2:], grad.shape[2:], **window)
    out_channels, channels = weight_shape[0] // groups, weight_shape[1]

    def body(i: Any, s: Any) -> tuple[Any, Any]:
        (o, c, *places), (n, *outs) = i, s
        at, valid = geometry.inputs(outs, places)
        channel = tirx.floordiv(o, _number(out_channels)) * channels + c
        return grad[(n, o, *outs)] * x[(n, channel, *at)], valid

    return _summed(op, (grad.shape[0], *grad.shape[2:]), compute_dtype(grad.dtype), body)
