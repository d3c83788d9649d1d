# SPDX-License-Identifier: Apache-2.0
"""Padding with the tensor's own elements (reflection, replication), and the gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tvm import relax

from amp_ir.importer.converters.axis_map import AxisMap, apply_axis_map
from amp_ir.importer.converters.emitter import Emitter
from amp_ir.importer.converters.promotion import dtype_of, is_float, shape_of
from amp_ir.importer.converters.registry import Converter, converts

aten = torch.ops.aten


def _axis_weights(mode: str, extent: int, before: int, after: int) -> torch.Tensor:
    """Return f64[extent, extent + before + after]: the source element of each padded position."""
    unit_vectors = torch.eye(extent, dtype=torch.float64)
    return torch.nn.functional.pad(unit_vectors[None], (before, after), mode=mode)[0]


def _padded(
    ops: Emitter, x: relax.Expr, mode: str, padding: Sequence[int], *, backward: bool
) -> relax.Expr:
    dtype = dtype_of(x)
    low = is_float(dtype) and dtype not in ("float32", "float64")
    wide = ops.cast(x, "float32") if low and backward else x
    for k in range(len(padding) // 2):
        axis = len(shape_of(x)) - 1 - k
        before, after = padding[2 * k], padding[2 * k + 1]
        extent = ops.shape[axis] if backward else shape_of(x)[axis]
        weights = _axis_weights(mode, extent, before, after)
        wide = apply_axis_map(ops, wide, axis, AxisMap(weights.T if backward else weights))
    return ops.cast(wide, dtype)


def _forward(mode: str) -> Converter:
    def convert(ops: Emitter, x: relax.Expr, padding: Sequence[int]) -> relax.Expr:
        return _padded(ops, x, mode, padding, backward=False)

    return convert


def _backward(mode: str) -> Converter:
    def convert(
        ops: Emitter, grad: relax.Expr, _x: relax.Expr, padding: Sequence[int]
    ) -> relax.Expr:
        return _padded(ops, grad, mode, padding, backward=True)

    return convert


for _packet, _mode in (("reflection_pad", "reflect"), ("replication_pad", "replicate")):
    for _ndim_space in (1, 2, 3):
        converts(getattr(aten, f"{_packet}{_ndim_space}d").default)(_forward(_mode))
        converts(getattr(aten, f"{_packet}{_ndim_space}d_backward").default)(_backward(_mode))
