# SPDX-License-Identifier: Apache-2.0
"""Resizing: nearest, linear, bilinear, trilinear and bicubic, and their gradients.

Each is a composition of linear maps, one per axis. PyTorch itself computes the map of an axis:
the 1-d op is applied to the unit vectors, and to infinite ones, of which it makes NaN where it
multiplies by a weight of 0. The map and its transpose (the gradient) become a few gathers along
the axis with constant weights, so that no result depends on an order of adds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from tvm import relax

from amp_ir.importer.converters.axis_map import AxisMap, apply_axis_map
from amp_ir.importer.converters.emitter import Emitter, dtype_name
from amp_ir.importer.converters.promotion import dtype_of, is_float, shape_of
from amp_ir.importer.converters.registry import Converter, converts

aten = torch.ops.aten
# Rows and columns of a plane up to which PyTorch resizes by its kernel for channels last (2.11 to
# 2.13, `_use_vectorized_kernel_cond_2d` in UpSampleKernel.cpp).
_SMALL_PLANE = 128

# (out extent, scale or None, lines) -> every line resampled to the out extent: [1, n, extent] to
# [1, n, out extent].
Resampling: TypeAlias = Callable[[int, float | None, torch.Tensor], torch.Tensor]


def _nearest(out: int, scale: float | None, lines: torch.Tensor) -> torch.Tensor:
    return aten.upsample_nearest1d(lines, [out], scale)


def _nearest_of_planes(out: int, scale: float | None, lines: torch.Tensor) -> torch.Tensor:
    # Channels last, of which there are four: PyTorch's other kernel takes no notice of a scale by
    # which the extent stays or doubles, 3 * 1.3 and 4 * 2.2.
    planes = torch.nn.functional.pad(lines[..., None], (0, 0, 0, 0, 0, 4))
    planes = planes.contiguous(memory_format=torch.channels_last)
    resampled = aten.upsample_nearest2d(planes, [out, 1], scale, None)
    return resampled[:, : lines.shape[1], :, 0]


def _forward_nearest(shape: Sequence[int], resample: Resampling) -> Resampling:
    """Return the map that PyTorch has for a result [n, c, *shape]; for its gradient it is another.

    Of larger planes with channels last it takes the one of small planes, too, and so of volumes:
    the order in memory is not known here, and the capture refuses those where the two differ.
    """
    is_small = len(shape) == 2 and sum(shape) <= _SMALL_PLANE
    return _nearest_of_planes if resample is _nearest and is_small else resample


def _nearest_exact(out: int, scale: float | None, lines: torch.Tensor) -> torch.Tensor:
    return aten._upsample_nearest_exact1d(lines, [out], scale)


def _linear(*, align_corners: bool) -> Resampling:
    def resample(out: int, scale: float | None, lines: torch.Tensor) -> torch.Tensor:
        return aten.upsample_linear1d(lines, [out], align_corners, scale)

    return resample


def _cubic(*, align_corners: bool) -> Resampling:
    def resample(out: int, scale: float | None, lines: torch.Tensor) -> torch.Tensor:
        # Bicubic exists in 2-d only. The lines are the third of five columns, whose neighbours with
        # a weight of 0 are other columns: of a single column it would be itself. The third is the
        # middle of the new columns too, which are not five: PyTorch copies gradients of equal size.
        planes = torch.nn.functional.pad(lines[..., None], (2, 2))
        columns = 3 if align_corners else 1
        resampled = aten.upsample_bicubic2d(planes, [out, columns], align_corners, scale, None)
        return resampled[..., columns // 2]

    return resample


def _antialiased(packet: Callable[..., torch.Tensor]) -> Callable[..., Resampling]:
    def make_resampling(*, align_corners: bool) -> Resampling:
        def resample(out: int, scale: float | None, lines: torch.Tensor) -> torch.Tensor:
            # Along the rows: PyTorch 2.13 misreads planes whose rows have one element.
            planes = lines[:, :, None]
            return packet(planes, [1, out], align_corners, None, scale)[:, :, 0]

        return resample

    return make_resampling


def _forward_map(lines: torch.Tensor, resample: Callable[..., torch.Tensor]) -> AxisMap:
    """Return the map of an axis whose unit vectors are `lines`."""
    weights = resample(lines[None])[0]
    return AxisMap(weights, resample(_infinite(lines)[None])[0].isnan())


def _backward_map(
    grads: torch.Tensor, extent: int, resample: Callable[..., torch.Tensor]
) -> AxisMap:
    """Return the map of gradients, whose unit vectors are `grads`, to those of `extent` places."""
    with torch.enable_grad():
        lines = grads.new_zeros(1, len(grads), extent, requires_grad=True)
        resampled = resample(lines)
        weights, infinite = (
            torch.autograd.grad(resampled, lines, one[None], retain_graph=True)[0][0]
            for one in (grads, _infinite(grads))
        )
    return AxisMap(weights, infinite.isnan())


def _infinite(unit_vectors: torch.Tensor) -> torch.Tensor:
    return unit_vectors.where(unit_vectors == 0, math.inf)


def _resample(
    ops: Emitter,
    x: relax.Expr,
    resample: Resampling,
    input_space: Sequence[int],
    output_space: Sequence[int],
    scales: Sequence[float | None],
    *,
    backward: bool,
) -> relax.Expr:
    """Return x under the map (or its transpose) along every spatial axis, in float32 or wider."""
    result_dtype = dtype_of(x)
    if not is_float(result_dtype):
        ops.reject(f"upsampling of {result_dtype}")
    # The weights are those of PyTorch's own dtype: in another one, other ones are 0.
    dtype = torch.float64 if result_dtype == "float64" else torch.float32
    wide = ops.cast(x, dtype_name(dtype))
    first = len(shape_of(x)) - len(input_space)
    for k, (extent, out) in enumerate(zip(input_space, output_space, strict=True)):
        scale = scales[k] if k < len(scales) else None
        along = functools.partial(resample, out, scale)
        units = torch.eye(out if backward else extent, dtype=dtype)
        axis_map = _backward_map(units, extent, along) if backward else _forward_map(units, along)
        wide = apply_axis_map(ops, wide, first + k, axis_map)
    return ops.cast(wide, result_dtype)


def _forward(
    ops: Emitter, x: relax.Expr, resample: Resampling, scales: Sequence[float | None]
) -> relax.Expr:
    return _resample(ops, x, resample, shape_of(x)[2:], ops.shape[2:], scales, backward=False)


def _backward(
    ops: Emitter, grad: relax.Expr, resample: Resampling, scales: Sequence[float | None]
) -> relax.Expr:
    return _resample(ops, grad, resample, ops.shape[2:], shape_of(grad)[2:], scales, backward=True)


def _register_nearest(packet: str, resample: Resampling) -> None:
    def forward(ops: Emitter, x: relax.Expr, _size: object, *scales: float | None) -> relax.Expr:
        return _forward(ops, x, _forward_nearest(ops.shape[2:], resample), scales)

    def forward_vec(
        ops: Emitter, x: relax.Expr, _size: object, scales: Sequence[float] | None
    ) -> relax.Expr:
        return _forward(ops, x, _forward_nearest(ops.shape[2:], resample), scales or ())

    def backward(
        ops: Emitter, grad: relax.Expr, _size: object, _input: object, *scales: float | None
    ) -> relax.Expr:
        return _backward(ops, grad, resample, scales)

    _register(packet, forward, forward_vec, backward)


def _register_aligned(packet: str, make_resampling: Callable[..., Resampling]) -> None:
    def forward(
        ops: Emitter, x: relax.Expr, _size: object, align_corners: bool, *scales: float | None
    ) -> relax.Expr:
        return _forward(ops, x, make_resampling(align_corners=align_corners), scales)

    def forward_vec(
        ops: Emitter,
        x: relax.Expr,
        _size: object,
        align_corners: bool,
        scales: Sequence[float] | None,
    ) -> relax.Expr:
        return _forward(ops, x, make_resampling(align_corners=align_corners), scales or ())

    def backward(
        ops: Emitter,
        grad: relax.Expr,
        _size: object,
        _input: object,
        align_corners: bool,
        *scales: float | None,
    ) -> relax.Expr:
        if make_resampling is _cubic and shape_of(grad) == ops.shape:
            return grad  # As PyTorch, which weighs no neighbours by 0 there.
        return _backward(ops, grad, make_resampling(align_corners=align_corners), scales)

    _register(packet, forward, forward_vec, backward)


def _register(packet: str, forward: Converter, forward_vec: Converter, backward: Converter) -> None:
    converts(getattr(aten, packet).default)(forward)
    converts(getattr(aten, packet).vec)(forward_vec)
    converts(getattr(aten, f"{packet}_backward").default)(backward)


for _ndim_space in (1, 2, 3):
    _register_nearest(f"upsample_nearest{_ndim_space}d", _nearest)
    _register_nearest(f"_upsample_nearest_exact{_ndim_space}d", _nearest_exact)
_register_aligned("upsample_linear1d", _linear)
_register_aligned("upsample_bilinear2d", _linear)
_register_aligned("upsample_bicubic2d", _cubic)
_register_aligned("upsample_trilinear3d", _linear)
_register_aligned("_upsample_bilinear2d_aa", _antialiased(aten._upsample_bilinear2d_aa))
_register_aligned("_upsample_bicubic2d_aa", _antialiased(aten._upsample_bicubic2d_aa))
