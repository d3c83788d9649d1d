# SPDX-License-Identifier: Apache-2.0
"""Max, average and adaptive poolings, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from tvm import relax

from amp_ir.importer.converters.emitter import Emitter
from amp_ir.importer.converters.promotion import shape_of
from amp_ir.importer.converters.registry import Converter, converts

aten = torch.ops.aten
Numbers: TypeAlias = Sequence[int] | int


def _every_axis(numbers: Numbers, ndim_space: int) -> tuple[int, ...]:
    several = [numbers] if isinstance(numbers, int) else list(numbers)
    return tuple(several * ndim_space if len(several) == 1 else several)


def _windows(ndim_space: int, kernel: Numbers, stride: Numbers, padding: Numbers) -> dict[str, Any]:
    """Return the window options of a dialect op; no stride means that windows do not overlap."""
    sizes = _every_axis(kernel, ndim_space)
    strides = _every_axis(stride, ndim_space) or sizes
    return {"kernel": sizes, "strides": strides, "padding": _every_axis(padding, ndim_space)}


def _max_pool(ndim_space: int) -> Converter:
    def convert(
        ops: Emitter,
        x: relax.Expr,
        kernel: Numbers,
        stride: Numbers = (),
        padding: Numbers = 0,
        dilation: Numbers = 1,
        ceil_mode: bool = False,
    ) -> tuple[relax.Expr, ...]:
        result: tuple[relax.Expr, ...] = ops.call(
            "amp_ir.max_pool",
            x,
            **_windows(ndim_space, kernel, stride, padding),
            dilation=_every_axis(dilation, ndim_space),
            ceil_mode=ceil_mode,
        )
        return result

    return convert


def _max_pool_backward(ndim_space: int) -> Converter:
    def convert(
        ops: Emitter,
        grad: relax.Expr,
        x: relax.Expr,
        kernel: Numbers,
        stride: Numbers,
        padding: Numbers,
        dilation: Numbers,
        ceil_mode: bool,
        indices: relax.Expr,
    ) -> relax.Expr:
        return ops.call(
            "amp_ir.max_pool_backward",
            grad,
            indices,
            input_shape=shape_of(x),
            **_windows(ndim_space, kernel, stride, padding),
            dilation=_every_axis(dilation, ndim_space),
            ceil_mode=ceil_mode,
        )

    return convert


def _avg_pool(ndim_space: int) -> Converter:
    def convert(
        ops: Emitter,
        x: relax.Expr,
        kernel: Numbers,
        stride: Numbers = (),
        padding: Numbers = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor: int | None = None,
    ) -> relax.Expr:
        return ops.call(
            "amp_ir.avg_pool",
            x,
            **_windows(ndim_space, kernel, stride, padding),
            ceil_mode=ceil_mode,
            count_include_pad=count_include_pad,
            divisor=divisor,
        )

    return convert


def _avg_pool_backward(ndim_space: int) -> Converter:
    def convert(
        ops: Emitter,
        grad: relax.Expr,
        x: relax.Expr,
        kernel: Numbers,
        stride: Numbers,
        padding: Numbers,
        ceil_mode: bool,
        count_include_pad: bool,
        divisor: int | None,
    ) -> relax.Expr:
        return ops.call(
            "amp_ir.avg_pool_backward",
            grad,
            input_shape=shape_of(x),
            **_windows(ndim_space, kernel, stride, padding),
            ceil_mode=ceil_mode,
            count_include_pad=count_include_pad,
            divisor=divisor,
        )

    return convert


def _adaptive(name: str, ndim_space: int) -> Converter:
    def convert(ops: Emitter, x: relax.Expr, output_size: Numbers) -> Any:
        return ops.call(name, x, output_size=_every_axis(output_size, ndim_space))

    return convert


def _adaptive_backward(name: str, ndim_space: int) -> Converter:
    def convert(ops: Emitter, grad: relax.Expr, x: relax.Expr, *indices: relax.Expr) -> relax.Expr:
        return ops.call(name, grad, *indices, input_shape=shape_of(x), ndim_space=ndim_space)

    return convert


converts(aten.max_pool1d_with_indices.default)(_max_pool(1))
converts(aten.max_pool2d_with_indices.default)(_max_pool(2))
converts(aten.max_pool3d_with_indices.default)(_max_pool(3))
converts(aten.max_pool2d_with_indices_backward.default)(_max_pool_backward(2))
converts(aten.max_pool3d_with_indices_backward.default)(_max_pool_backward(3))
converts(aten.avg_pool1d.default)(_avg_pool(1))
converts(aten.avg_pool2d.default)(_avg_pool(2))
converts(aten.avg_pool3d.default)(_avg_pool(3))
converts(aten.avg_pool2d_backward.default)(_avg_pool_backward(2))
converts(aten.avg_pool3d_backward.default)(_avg_pool_backward(3))
_ADAPTIVE = (
    (aten.adaptive_avg_pool1d.default, "amp_ir.adaptive_avg_pool", 1),
    (aten._adaptive_avg_pool2d.default, "amp_ir.adaptive_avg_pool", 2),
    (aten._adaptive_avg_pool3d.default, "amp_ir.adaptive_avg_pool", 3),
    (aten.adaptive_max_pool1d.default, "amp_ir.adaptive_max_pool", 1),
    (aten.adaptive_max_pool2d.default, "amp_ir.adaptive_max_pool", 2),
    (aten.adaptive_max_pool3d.default, "amp_ir.adaptive_max_pool", 3),
)
_ADAPTIVE_BACKWARD = (
    (aten._adaptive_avg_pool2d_backward.default, "amp_ir.adaptive_avg_pool_backward", 2),
    (aten._adaptive_avg_pool3d_backward.default, "amp_ir.adaptive_avg_pool_backward", 3),
    (aten.adaptive_max_pool2d_backward.default, "amp_ir.adaptive_max_pool_backward", 2),
    (aten.adaptive_max_pool3d_backward.default, "amp_ir.adaptive_max_pool_backward", 3),
)
for _overload, _name, _ndim_space in _ADAPTIVE:
    converts(_overload)(_adaptive(_name, _ndim_space))
for _overload, _name, _ndim_space in _ADAPTIVE_BACKWARD:
    converts(_overload)(_adaptive_backward(_name, _ndim_space))
