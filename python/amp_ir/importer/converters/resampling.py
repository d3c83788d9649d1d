# SPDX-License-Identifier: Apache-2.0
"""Resizing: nearest, linear, bilinear, trilinear and bicubic, and their gradients.

Each is a composition of linear maps, one per axis. PyTorch itself computes the map of an axis:
the 1-d op is applied to the unit vectors. The map and its transpose (the gradient) become
a few gathers along the axis with constant weights, so that no result depends on an order of adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from tvm import relax

from amp_ir.importer.converters.axis_map import apply_axis_map
from amp_ir.importer.converters.emitter import Emitter
from amp_ir.importer.converters.promotion import dtype_of, is_float, shape_of
from amp_ir.importer.converters.registry import Converter, converts

aten = torch.ops.aten

# (extent, out extent, scale or None) -> f64[extent, out extent], the map of one axis.
AxisMap: TypeAlias = Callable[[int, int, float | None], torch.Tensor]


def _nearest(extent: int, out: int, scale: float | None) -> torch.Tensor:
    return aten.upsample_nearest1d(_unit_vectors(extent), [out], scale)[0]


def _nearest_exact(extent: int, out: int, scale: float | None) -> torch.Tensor:
    return aten._upsample_nearest_exact1d(_unit_vectors(extent), [out], scale)[0]


def _linear(*, align_corners: bool) -> AxisMap:
    def axis_map(extent: int, out: int, scale: float | None) -> torch.Tensor:
        return aten.upsample_linear1d(_unit_vectors(extent), [out], align_corners, scale)[0]

    return axis_map


def _cubic(*, align_corners: bool) -> AxisMap:
    def axis_map(extent: int, out: int, scale: float | None) -> torch.Tensor:
        # Bicubic exists in 2-d only; along an axis of extent 1 it does nothing.
        planes = _unit_vectors(extent)[..., None]
        return aten.upsample_bicubic2d(planes, [out, 1], align_corners, scale, None)[0, :, :, 0]

    return axis_map


def _antialiased(resample: Callable[..., torch.Tensor]) -> Callable[..., AxisMap]:
    def make_map(*, align_corners: bool) -> AxisMap:
        def axis_map(extent: int, out: int, scale: float | None) -> torch.Tensor:
            # Along the rows: PyTorch 2.13 misreads planes whose rows have one element.
            planes = _unit_vectors(extent)[:, :, None]
            return resample(planes, [1, out], align_corners, None, scale)[0, :, 0]

        return axis_map

    return make_map


def _unit_vectors(extent: int) -> torch.Tensor:
    return torch.eye(extent, dtype=torch.float64)[None]


def _resample(
    ops: Emitter,
    x: relax.Expr,
    axis_map: AxisMap,
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
    wide = ops.cast(x, "float64" if result_dtype == "float64" else "float32")
    first = len(shape_of(x)) - len(input_space)
    for k, (extent, out) in enumerate(zip(input_space, output_space, strict=True)):
        scale = scales[k] if k < len(scales) else None
        weights = axis_map(extent, out, scale)
        wide = apply_axis_map(ops, wide, first + k, weights.T if backward else weights)
    return ops.cast(wide, result_dtype)


def _forward(
    ops: Emitter, x: relax.Expr, axis_map: AxisMap, scales: Sequence[float | None]
) -> relax.Expr:
    return _resample(ops, x, axis_map, shape_of(x)[2:], ops.shape[2:], scales, backward=False)


def _backward(
    ops: Emitter, grad: relax.Expr, axis_map: AxisMap, scales: Sequence[float | None]
) -> relax.Expr:
    return _resample(ops, grad, axis_map, ops.shape[2:], shape_of(grad)[2:], scales, backward=True)


def _register_nearest(packet: str, axis_map: AxisMap) -> None:
    def forward(ops: Emitter, x: relax.Expr, _size: object, *scales: float | None) -> relax.Expr:
        return _forward(ops, x, axis_map, scales)

    def forward_vec(
        ops: Emitter, x: relax.Expr, _size: object, scales: Sequence[float] | None
    ) -> relax.Expr:
        return _forward(ops, x, axis_map, scales or ())

    def backward(
        ops: Emitter, grad: relax.Expr, _size: object, _input: object, *scales: float | None
    ) -> relax.Expr:
        return _backward(ops, grad, axis_map, scales)

    _register(packet, forward, forward_vec, backward)


def _register_aligned(packet: str, make_map: Callable[..., AxisMap]) -> None:
    def forward(
        ops: Emitter, x: relax.Expr, _size: object, align_corners: bool, *scales: float | None
    ) -> relax.Expr:
        return _forward(ops, x, make_map(align_corners=align_corners), scales)

    def forward_vec(
        ops: Emitter,
        x: relax.Expr,
        _size: object,
        align_corners: bool,
        scales: Sequence[float] | None,
    ) -> relax.Expr:
        return _forward(ops, x, make_map(align_corners=align_corners), scales or ())

    def backward(
        ops: Emitter,
        grad: relax.Expr,
        _size: object,
        _input: object,
        align_corners: bool,
        *scales: float | None,
    ) -> relax.Expr:
        return _backward(ops, grad, make_map(align_corners=align_corners), scales)

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
