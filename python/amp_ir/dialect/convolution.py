# SPDX-License-Identifier: Apache-2.0
"""Convolutions of 1 to 3 spatial axes and their gradients.

Layouts are PyTorch's: data f[n, c, *space], weights f[out, c / groups, *window]. `strides`,
`padding` (the same on both sides) and `dilation` have one number per spatial axis. A bias is a
separate add. Both tensors have one dtype; accumulation is float32, and the result is rounded once
to `out_dtype` (by default the dtype of the tensors).
"""

from __future__ import annotations

from typing import Any

import torch

from amp_ir.dialect.define import FLOAT_DTYPES, Shape, Tensor, check_choice, check_length, define
from amp_ir.errors import OptionError


def convolved_shape(
    x: Shape,
    weight: Shape,
    *,
    strides: Shape,
    padding: Shape,
    dilation: Shape,
) -> Shape:
    """Return the shape of conv's result for shapes of data and weights."""
    space = tuple(
        (extent + 2 * pad - dilated * (window - 1) - 1) // stride + 1
        for extent, window, stride, pad, dilated in zip(
            x[2:], weight[2:], strides, padding, dilation, strict=True
        )
    )
    return (x[0], weight[0], *space)


def _check_options(op: str, ndim_space: int, out_dtype: str | None, **geometry: Shape) -> None:
    if not 1 <= ndim_space <= 3:
        raise OptionError(f"{op} has {ndim_space} spatial axes, expected 1 to 3")
    for option, got in geometry.items():
        check_length(op, option, got, ndim_space)
    check_choice(op, "out_dtype", out_dtype, (None, *FLOAT_DTYPES))


def _expect_pair(first: Tensor, second: Tensor) -> None:
    first.expect_float()
    second.expect_dtype(first.dtype)
    if second.ndim != first.ndim:
        second.refuse("shape", f"{first.ndim} axes, as {first.label} of shape {first.shape}")


def _expect_channels(weight: Tensor, channels: int, groups: int) -> None:
    if groups < 1 or channels % groups or weight.shape[1] * groups != channels:
        weight.refuse(
            "shape", f"{channels} / {groups} input channels a group on axis 1 (groups={groups})"
        )
    if weight.shape[0] % groups:
        weight.refuse("shape", f"a multiple of groups={groups} output channels on axis 0")


def _gradient_of(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    strides: Shape,
    padding: Shape,
    dilation: Shape,
    groups: int,
    of_input: bool,
) -> torch.Tensor:
    gradients = torch.ops.aten.convolution_backward(
        grad, x, weight, None, strides, padding, dilation, False, [0] * len(strides), groups,
        [of_input, not of_input, False],
    )  # fmt: skip
    return gradients[0 if of_input else 1]


def _conv(
    x: torch.Tensor, weight: torch.Tensor, *, groups: int, out_dtype: str | None, **geometry: Shape
) -> torch.Tensor:
    strides, padding, dilation = (geometry[name] for name in ("strides", "padding", "dilation"))
    return torch.ops.aten.convolution(
        x, weight, None, strides, padding, dilation, False, [0] * len(strides), groups
    )


@define("amp_ir.conv", "x", "weight", reference=_conv)
def conv(
    x: Tensor,
    weight: Tensor,
    *,
    strides: Shape,
    padding: Shape,
    dilation: Shape,
    groups: int = 1,
    out_dtype: str | None = None,
) -> Tensor:
    """Convolve x with weight.

    x f[n, c, *space], weight f[o, c / groups, *window] -> out_dtype[n, o, *out_space].
    """
    _expect_pair(x, weight)
    geometry = {"strides": strides, "padding": padding, "dilation": dilation}
    _check_options("amp_ir.conv", x.ndim - 2, out_dtype, **geometry)
    _expect_channels(weight, x.shape[1], groups)
    shape = convolved_shape(x.shape, weight.shape, **geometry)
    if min(shape[2:]) < 1:
        x.refuse("shape", f"space no smaller than the window {weight.shape[2:]} (with padding)")
    return Tensor(shape, out_dtype or x.dtype)


def _conv_backward_input(
    grad: torch.Tensor,
    weight: torch.Tensor,
    *,
    input_shape: Shape,
    out_dtype: str | None,
    **options: Any,
) -> torch.Tensor:
    return _gradient_of(grad, grad.new_empty(input_shape), weight, of_input=True, **options)


def _transposed(
    op: str,
    x: Tensor,
    weight: Tensor,
    groups: int,
    out_dtype: str | None,
    geometry: dict[str, Shape],
    **shape_option: Shape,
) -> Tensor:
    """Return the type of conv transposed; the one `shape_option` is the shape of its result."""
    ((option, shape),) = shape_option.items()
    _expect_pair(x, weight)
    _check_options(op, x.ndim - 2, out_dtype, **geometry)
    check_length(op, option, shape[2:], x.ndim - 2)
    _expect_channels(weight, shape[1], groups)
    x.expect_shape(convolved_shape(shape, weight.shape, **geometry))
    return Tensor(tuple(shape), out_dtype or x.dtype)


@define("amp_ir.conv_backward_input", "grad", "weight", reference=_conv_backward_input)
def conv_backward_input(
    grad: Tensor,
    weight: Tensor,
    *,
    input_shape: Shape,
    strides: Shape,
    padding: Shape,
    dilation: Shape,
    groups: int = 1,
    out_dtype: str | None = None,
) -> Tensor:
    """Return dx of conv.

    grad f[n, o, *out_space], weight f[o, c / groups, *window] -> [*input_shape].
    """
    geometry = {"strides": strides, "padding": padding, "dilation": dilation}
    op = "amp_ir.conv_backward_input"
    return _transposed(op, grad, weight, groups, out_dtype, geometry, input_shape=input_shape)


def _conv_backward_weight(
    grad: torch.Tensor,
    x: torch.Tensor,
    *,
    weight_shape: Shape,
    out_dtype: str | None,
    **options: Any,
) -> torch.Tensor:
    return _gradient_of(grad, x, grad.new_empty(weight_shape), of_input=False, **options)


@define("amp_ir.conv_backward_weight", "grad", "x", reference=_conv_backward_weight)
def conv_backward_weight(
    grad: Tensor,
    x: Tensor,
    *,
    weight_shape: Shape,
    strides: Shape,
    padding: Shape,
    dilation: Shape,
    groups: int = 1,
    out_dtype: str | None = None,
) -> Tensor:
    """Return dweight of conv: grad f[n, o, *out_space], x f[n, c, *space] -> [*weight_shape]."""
    _expect_pair(grad, x)
    op = "amp_ir.conv_backward_weight"
    geometry = {"strides": strides, "padding": padding, "dilation": dilation}
    _check_options(op, grad.ndim - 2, out_dtype, **geometry)
    check_length(op, "weight_shape", weight_shape[2:], grad.ndim - 2)
    weight = Tensor(tuple(weight_shape), grad.dtype, f"option weight_shape of {op}")
    _expect_channels(weight, x.shape[1], groups)
    grad.expect_shape(convolved_shape(x.shape, weight.shape, **geometry))
    return Tensor(weight.shape, out_dtype or grad.dtype)


def _conv_transpose(
    x: torch.Tensor, weight: torch.Tensor, *, output_shape: Shape, **options: Any
) -> torch.Tensor:
    return _conv_backward_input(x, weight, input_shape=output_shape, **options)


@define("amp_ir.conv_transpose", "x", "weight", reference=_conv_transpose)
def conv_transpose(
    x: Tensor,
    weight: Tensor,
    *,
    output_shape: Shape,
    strides: Shape,
    padding: Shape,
    dilation: Shape,
    groups: int = 1,
    out_dtype: str | None = None,
) -> Tensor:
    """Convolve transposed: the gradient of conv with respect to its input.

    x f[n, i, *space], weight f[i, o / groups, *window] -> [*output_shape] = [n, o, *out_space];
    `output_shape` is the whole shape, PyTorch's output_padding included. Its own gradients are
    conv(grad, weight) and conv_backward_weight(grad=x, x=grad, weight_shape=weight.shape).
    """
    geometry = {"strides": strides, "padding": padding, "dilation": dilation}
    op = "amp_ir.conv_transpose"
    return _transposed(op, x, weight, groups, out_dtype, geometry, output_shape=output_shape)
