# SPDX-License-Identifier: Apache-2.0
"""Convolutions of 1 to 3 spatial axes, transposed ones, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tvm import relax

from amp_ir.importer.converters.emitter import Emitter
from amp_ir.importer.converters.promotion import shape_of
from amp_ir.importer.converters.registry import converts

aten = torch.ops.aten


def _every_axis(numbers: Sequence[int], x: relax.Expr) -> tuple[int, ...]:
    """Return one number per spatial axis, where PyTorch may give one number for all of them."""
    ndim_space = len(shape_of(x)) - 2
    return tuple(numbers) * ndim_space if len(numbers) == 1 else tuple(numbers)


@converts(aten.convolution.default)
def convolution(
    ops: Emitter,
    x: relax.Expr,
    weight: relax.Expr,
    bias: relax.Expr | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> relax.Expr:
    """Return the convolution of x f[n, c, *space] with f[o, c / groups, *window], plus bias f[o].

    The weight of a transposed convolution is f[c, o / groups, *window].
    """
    windows = {
        "strides": _every_axis(stride, x),
        "padding": _every_axis(padding, x),
        "dilation": _every_axis(dilation, x),
        "groups": groups,
    }
    if transposed:
        y = ops.call("amp_ir.conv_transpose", x, weight, output_shape=ops.shape, **windows)
    else:
        y = ops.call("amp_ir.conv", x, weight, **windows)
    if bias is None:
        return y
    channels = shape_of(bias)[0]
    return ops.add(y, ops.reshape(bias, [1, channels, *[1] * (len(shape_of(y)) - 2)]))


@converts(aten.convolution_backward.default)
def convolution_backward(
    ops: Emitter,
    grad: relax.Expr,
    x: relax.Expr,
    weight: relax.Expr,
    _bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    _output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> tuple[relax.Expr | None, ...]:
    """Return (dx, dweight, dbias), each where the mask requests it."""
    windows = {
        "strides": _every_axis(stride, x),
        "padding": _every_axis(padding, x),
        "dilation": _every_axis(dilation, x),
        "groups": groups,
    }
    dx = dweight = dbias = None
    if mask[0] and transposed:
        # A transposed convolution is the input gradient of a plain one with the same weight.
        dx = ops.call("amp_ir.conv", grad, weight, **windows)
    elif mask[0]:
        dx = ops.call(
            "amp_ir.conv_backward_input", grad, weight, input_shape=shape_of(x), **windows
        )
    if mask[1]:
        pair = (x, grad) if transposed else (grad, x)
        dweight = ops.call(
            "amp_ir.conv_backward_weight", *pair, weight_shape=shape_of(weight), **windows
        )
    if mask[2]:
        axes = [0, *range(2, len(shape_of(grad)))]
        dbias = ops.emit(relax.op.sum(grad, axes))
    return dx, dweight, dbias
