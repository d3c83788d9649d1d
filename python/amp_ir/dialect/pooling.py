# SPDX-License-Identifier: Apache-2.0
"""Poolings over 1 to 3 spatial axes and their gradients.

Data are f[*batch, *space]: the spatial axes are the last `len(kernel)` (or `len(output_size)`)
ones, any axes may come before them. Options have one number per spatial axis. `indices` are int64
flat positions in the spatial plane, as PyTorch's.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from amp_ir.dialect.define import Shape, Tensor, check_length, define
from amp_ir.errors import OptionError


def pooled_extent(
    extent: int, kernel: int, stride: int, pad: int, dilation: int, ceil_mode: bool
) -> int:
    """Return how many windows an axis of `extent` has, by PyTorch's rule for the last window.

    The last window begins inside the axis.
    """
    span = extent + 2 * pad - dilation * (kernel - 1) - 1
    count = (span + (stride - 1 if ceil_mode else 0)) // stride + 1
    return count - 1 if ceil_mode and (count - 1) * stride >= extent + pad else count


def _pooled(
    op: str,
    x: Shape,
    kernel: Shape,
    strides: Shape,
    padding: Shape,
    dilation: Shape | None,
    ceil_mode: bool,
) -> Shape:
    """Check the options of a window, and return the shape of its op's result."""
    dilation = dilation or (1,) * len(kernel)
    if not 1 <= len(kernel) <= min(3, len(x)):
        raise OptionError(
            f"{op}: option kernel is {tuple(kernel)}, expected 1 to 3 numbers, one a spatial axis"
        )
    for option, got in (("strides", strides), ("padding", padding), ("dilation", dilation)):
        check_length(op, option, got, len(kernel))
    if any(2 * pad > window for pad, window in zip(padding, kernel, strict=True)):
        raise OptionError(
            f"{op}: option padding is {tuple(padding)}, expected at most half of "
            f"kernel {tuple(kernel)}"
        )
    windows = zip(x[-len(kernel) :], kernel, strides, padding, dilation, strict=True)
    return x[: -len(kernel)] + tuple(pooled_extent(*one, ceil_mode) for one in windows)


def _planes(x: torch.Tensor, ndim_space: int) -> torch.Tensor:
    """Reshape [*batch, *space] to [1, batch, *space], PyTorch's batch and channels."""
    return x.reshape(1, -1, *x.shape[x.ndim - ndim_space :])


def _as_batch(y: torch.Tensor, x_shape: Shape, ndim_space: int) -> torch.Tensor:
    return y.reshape(*x_shape[: len(x_shape) - ndim_space], *y.shape[2:])


def _max_pool(x: torch.Tensor, *, kernel: Shape, **options: Any) -> tuple[torch.Tensor, ...]:
    n = len(kernel)
    pool = getattr(torch.nn.functional, f"max_pool{n}d_with_indices")
    y, indices = pool(
        _planes(x, n), kernel, options["strides"], options["padding"], options["dilation"],
        options["ceil_mode"],
    )  # fmt: skip
    shape = tuple(x.shape)
    return _as_batch(y, shape, n), _as_batch(indices, shape, n)


@define("amp_ir.max_pool", "x", reference=_max_pool)
def max_pool(
    x: Tensor,
    *,
    kernel: Shape,
    strides: Shape,
    padding: Shape,
    dilation: Shape,
    ceil_mode: bool = False,
) -> tuple[Tensor, ...]:
    """Return the maximum of each window: x f[*batch, *space] -> (y f[*batch, *out], indices int64).

    Of equal elements the first counts; a NaN is larger than any number.
    """
    x.expect_float()
    shape = _pooled("amp_ir.max_pool", x.shape, kernel, strides, padding, dilation, ceil_mode)
    return x.with_shape(shape), Tensor(shape, "int64")


def _scatter_to(
    grad: torch.Tensor, indices: torch.Tensor, *, input_shape: Shape, **options: Any
) -> torch.Tensor:
    ndim_space = len(options["kernel"]) if "kernel" in options else options["ndim_space"]
    batch = math.prod(input_shape[:-ndim_space])
    flat = grad.new_zeros(batch, math.prod(input_shape[-ndim_space:]))
    flat.scatter_add_(1, indices.reshape(batch, -1), grad.reshape(batch, -1))
    return flat.reshape(input_shape)


@define("amp_ir.max_pool_backward", "grad", "indices", reference=_scatter_to)
def max_pool_backward(
    grad: Tensor,
    indices: Tensor,
    *,
    input_shape: Shape,
    kernel: Shape,
    strides: Shape,
    padding: Shape,
    dilation: Shape,
    ceil_mode: bool = False,
) -> Tensor:
    """Return dx of max_pool: grad f[*batch, *out], indices int64 likewise -> f[*input_shape].

    The window options are those of the forward op: they determine which windows cover an element.
    """
    grad.expect_float()
    op = "amp_ir.max_pool_backward"
    shape = tuple(input_shape)
    grad.expect_shape(_pooled(op, shape, kernel, strides, padding, dilation, ceil_mode))
    indices.expect_dtype("int64")
    indices.expect_shape(grad.shape)
    return grad.with_shape(input_shape)


def _avg_pool(
    x: torch.Tensor,
    *,
    kernel: Shape,
    strides: Shape,
    padding: Shape,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> torch.Tensor:
    n = len(kernel)
    planes = _planes(x, n)
    if n == 1:
        # avg_pool1d has no divisor; a spatial axis of extent 1 makes it the 2-d one.
        planes, kernel, strides, padding = (
            planes[..., None, :], (1, *kernel), (1, *strides), (0, *padding),
        )  # fmt: skip
    pool = torch.ops.aten.avg_pool3d if n == 3 else torch.ops.aten.avg_pool2d
    y = pool(planes, kernel, strides, padding, ceil_mode, count_include_pad, divisor)
    return _as_batch(y.squeeze(2) if n == 1 else y, tuple(x.shape), n)


def _check_divisor(op: str, divisor: int | None) -> None:
    if divisor is not None and divisor < 1:
        raise OptionError(f"{op}: option divisor is {divisor}, expected None or >= 1")


@define("amp_ir.avg_pool", "x", reference=_avg_pool)
def avg_pool(
    x: Tensor,
    *,
    kernel: Shape,
    strides: Shape,
    padding: Shape,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> Tensor:
    """Return the mean of each window: x f[*batch, *space] -> f[*batch, *out].

    A window's sum is divided by `divisor`, or by its number of elements, where padding counts
    only with `count_include_pad`; what is beyond the padding (ceil_mode) never counts.
    """
    x.expect_float()
    shape = _pooled("amp_ir.avg_pool", x.shape, kernel, strides, padding, None, ceil_mode)
    _check_divisor("amp_ir.avg_pool", divisor)
    return x.with_shape(shape)


def _transposed(linear: Any, grad: torch.Tensor, input_shape: Shape) -> torch.Tensor:
    """Return the gradient of a linear map, by autograd."""
    with torch.enable_grad():
        x = torch.zeros(input_shape, dtype=grad.dtype, requires_grad=True)
        return torch.autograd.grad(linear(x), x, grad)[0]


def _avg_pool_backward(grad: torch.Tensor, *, input_shape: Shape, **options: Any) -> torch.Tensor:
    return _transposed(lambda x: _avg_pool(x, **options), grad, input_shape)


@define("amp_ir.avg_pool_backward", "grad", reference=_avg_pool_backward)
def avg_pool_backward(
    grad: Tensor,
    *,
    input_shape: Shape,
    kernel: Shape,
    strides: Shape,
    padding: Shape,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> Tensor:
    """Return dx of avg_pool with the same options: grad f[*batch, *out] -> f[*input_shape]."""
    grad.expect_float()
    op = "amp_ir.avg_pool_backward"
    shape = _pooled(op, tuple(input_shape), kernel, strides, padding, None, ceil_mode)
    _check_divisor(op, divisor)
    grad.expect_shape(shape)
    return grad.with_shape(input_shape)


def _check_output_size(op: str, shape: Shape, output_size: Shape) -> Shape:
    if not 1 <= len(output_size) <= min(3, len(shape)) or min(output_size) < 1:
        raise OptionError(
            f"{op}: option output_size is {tuple(output_size)}, expected 1 to 3 positive numbers, "
            "one a spatial axis"
        )
    return shape[: -len(output_size)] + tuple(output_size)


def _adaptive_avg_pool(x: torch.Tensor, *, output_size: Shape) -> torch.Tensor:
    n = len(output_size)
    pool = getattr(torch.nn.functional, f"adaptive_avg_pool{n}d")
    return _as_batch(pool(_planes(x, n), output_size), tuple(x.shape), n)


@define("amp_ir.adaptive_avg_pool", "x", reference=_adaptive_avg_pool)
def adaptive_avg_pool(x: Tensor, *, output_size: Shape) -> Tensor:
    """Return means of `output_size` windows: x f[*batch, *space] -> f[*batch, *output_size].

    Window i of an axis of extent n covers floor(i n / out) up to ceil((i + 1) n / out) exclusive.
    """
    x.expect_float()
    return x.with_shape(_check_output_size("amp_ir.adaptive_avg_pool", x.shape, output_size))


def _adaptive_avg_pool_backward(grad: torch.Tensor, *, input_shape: Shape, ndim_space: int) -> Any:
    output_size = tuple(grad.shape[grad.ndim - ndim_space :])
    return _transposed(lambda x: _adaptive_avg_pool(x, output_size=output_size), grad, input_shape)


def _check_adaptive_backward(op: str, grad: Tensor, input_shape: Shape, ndim_space: int) -> None:
    grad.expect_float()
    if not 1 <= ndim_space <= min(3, grad.ndim):
        raise OptionError(f"{op}: option ndim_space is {ndim_space}, expected 1 to 3")
    grad.expect_shape(tuple(input_shape[:-ndim_space]) + grad.shape[-ndim_space:])


@define("amp_ir.adaptive_avg_pool_backward", "grad", reference=_adaptive_avg_pool_backward)
def adaptive_avg_pool_backward(grad: Tensor, *, input_shape: Shape, ndim_space: int) -> Tensor:
    """Return dx of adaptive_avg_pool over `ndim_space` axes.

    grad f[*batch, *out] -> f[*input_shape].
    """
    _check_adaptive_backward("amp_ir.adaptive_avg_pool_backward", grad, input_shape, ndim_space)
    return grad.with_shape(input_shape)


def _adaptive_max_pool(x: torch.Tensor, *, output_size: Shape) -> tuple[torch.Tensor, ...]:
    n, shape = len(output_size), tuple(x.shape)
    pool = getattr(torch.nn.functional, f"adaptive_max_pool{n}d_with_indices")
    y, indices = pool(_planes(x, n), output_size)
    return _as_batch(y, shape, n), _as_batch(indices, shape, n)


@define("amp_ir.adaptive_max_pool", "x", reference=_adaptive_max_pool)
def adaptive_max_pool(x: Tensor, *, output_size: Shape) -> tuple[Tensor, ...]:
    """Return the maxima of `output_size` windows: x f[*batch, *space] -> (y, indices int64)."""
    x.expect_float()
    shape = _check_output_size("amp_ir.adaptive_max_pool", x.shape, output_size)
    return x.with_shape(shape), Tensor(shape, "int64")


@define("amp_ir.adaptive_max_pool_backward", "grad", "indices", reference=_scatter_to)
def adaptive_max_pool_backward(
    grad: Tensor, indices: Tensor, *, input_shape: Shape, ndim_space: int
) -> Tensor:
    """Return dx of adaptive_max_pool.

    grad f[*batch, *out], indices int64 likewise -> f[*input_shape].
    """
    _check_adaptive_backward("amp_ir.adaptive_max_pool_backward", grad, input_shape, ndim_space)
    indices.expect_dtype("int64")
    indices.expect_shape(grad.shape)
    return grad.with_shape(input_shape)
