# SPDX-License-Identifier: Apache-2.0
"""Layer, RMS and group normalization as fused ops, and the gradient of weight normalization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from tvm import relax

from amp_ir.importer.converters.emitter import Emitter, dtype_name
from amp_ir.importer.converters.promotion import dtype_of, shape_of
from amp_ir.importer.converters.registry import converts

aten = torch.ops.aten


MaybeTensor: TypeAlias = relax.Expr | None


def present(*tensors: MaybeTensor) -> list[relax.Expr]:
    """Return the tensors that are not None."""
    return [tensor for tensor in tensors if tensor is not None]


def statistics(ops: Emitter, values: Sequence[relax.Expr], first: int) -> list[relax.Expr]:
    """Return the values from `first` on in the dtypes that PyTorch gives the node's results."""
    wanted = [dtype_name(one.dtype) for one in ops.result]
    return [
        ops.cast(ops.reshape(value, ops.result[i].shape), wanted[i]) if i >= first else value
        for i, value in enumerate(values)
    ]


def _norm(
    ops: Emitter, name: str, x: relax.Expr, *affine: MaybeTensor, **options: Any
) -> Sequence[relax.Expr]:
    """Return the result and its statistics; `affine` is (weight,) or (weight, bias)."""
    flags = zip(("has_weight", "has_bias"), affine, strict=False)
    options |= {flag: tensor is not None for flag, tensor in flags}
    return statistics(ops, ops.call(name, x, *present(*affine), **options), 1)


def _norm_backward(
    ops: Emitter,
    name: str,
    tensors: Sequence[relax.Expr],
    weight: MaybeTensor,
    mask: Sequence[bool],
    **options: int,
) -> tuple[MaybeTensor, ...]:
    """Return (dx, dweight, dbias if there is one), each where the mask requests it.

    `tensors` are the gradient, x and the statistics.
    """
    dx, of_weight = None, [None] * (len(mask) - 1)
    if mask[0]:
        has_weight = weight is not None
        operands = [*tensors, *present(weight)]
        dx = ops.call(f"{name}_backward_input", *operands, **options, has_weight=has_weight)
    if any(mask[1:]):
        found = ops.call(f"{name}_backward_weight", *tensors, **options)
        of_weight = list(found) if len(mask) == 3 else [found]
    return wanted_of(ops, mask, dx, *of_weight)


@converts(aten.native_layer_norm.default)
def layer_norm(
    ops: Emitter,
    x: relax.Expr,
    normalized_shape: Sequence[int],
    weight: MaybeTensor,
    bias: MaybeTensor,
    eps: float,
) -> Sequence[relax.Expr]:
    """Return (y, mean, rstd)."""
    ndim = len(normalized_shape)
    return _norm(ops, "amp_ir.layer_norm", x, weight, bias, ndim_normalized=ndim, eps=eps)


@converts(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    ops: Emitter,
    grad: relax.Expr,
    x: relax.Expr,
    normalized_shape: Sequence[int],
    mean: relax.Expr,
    rstd: relax.Expr,
    weight: MaybeTensor,
    bias: MaybeTensor,
    mask: Sequence[bool],
) -> tuple[MaybeTensor, ...]:
    """Return (dx, dweight, dbias)."""
    tensors, ndim = (grad, x, mean, rstd), len(normalized_shape)
    return _norm_backward(ops, "amp_ir.layer_norm", tensors, weight, mask, ndim_normalized=ndim)


def wanted_of(ops: Emitter, mask: Sequence[bool], *values: MaybeTensor) -> tuple[MaybeTensor, ...]:
    """Return the values that the mask requests, in the dtypes of PyTorch's results."""
    return tuple(
        ops.cast(value, dtype_name(result.dtype)) if wanted and value is not None else None
        for wanted, value, result in zip(mask, values, ops.result, strict=True)
    )


@converts(aten._fused_rms_norm.default)
def rms_norm(
    ops: Emitter,
    x: relax.Expr,
    normalized_shape: Sequence[int],
    weight: MaybeTensor,
    eps: float | None,
) -> Sequence[relax.Expr]:
    """Return (y, rstd); eps None is the machine epsilon of the statistics' dtype."""
    statistic = dtype_name(ops.result[1].dtype)
    step = torch.finfo(torch.float64 if statistic == "float64" else torch.float32).eps
    ndim = len(normalized_shape)
    eps = step if eps is None else eps
    return _norm(ops, "amp_ir.rms_norm", x, weight, ndim_normalized=ndim, eps=eps)


@converts(aten._fused_rms_norm_backward.default)
def rms_norm_backward(
    ops: Emitter,
    grad: relax.Expr,
    x: relax.Expr,
    normalized_shape: Sequence[int],
    rstd: relax.Expr,
    weight: MaybeTensor,
    mask: Sequence[bool],
) -> tuple[MaybeTensor, ...]:
    """Return (dx, dweight)."""
    tensors, ndim = (grad, x, rstd), len(normalized_shape)
    return _norm_backward(ops, "amp_ir.rms_norm", tensors, weight, mask, ndim_normalized=ndim)


@converts(aten.native_group_norm.default)
def group_norm(
    ops: Emitter,
    x: relax.Expr,
    weight: MaybeTensor,
    bias: MaybeTensor,
    _batch: int,
    _channels: int,
    _space: int,
    groups: int,
    eps: float,
) -> Sequence[relax.Expr]:
    """Return (y, mean, rstd)."""
    return _norm(ops, "amp_ir.group_norm", x, weight, bias, groups=groups, eps=eps)


@converts(aten.native_group_norm_backward.default)
def group_norm_backward(
    ops: Emitter,
    grad: relax.Expr,
    x: relax.Expr,
    mean: relax.Expr,
    rstd: relax.Expr,
    weight: MaybeTensor,
    _batch: int,
    _channels: int,
    _space: int,
    groups: int,
    mask: Sequence[bool],
) -> tuple[MaybeTensor, ...]:
    """Return (dx, dweight, dbias)."""
    tensors = (grad, x, mean, rstd)
    return _norm_backward(ops, "amp_ir.group_norm", tensors, weight, mask, groups=groups)


@converts(aten._weight_norm_interface_backward.default)
def weight_norm_backward(
    ops: Emitter,
    grad: relax.Expr,
    direction: relax.Expr,
    magnitude: relax.Expr,
    norms: relax.Expr,
    dim: int,
) -> tuple[relax.Expr, relax.Expr]:
    """Return (ddirection, dmagnitude) of weight = magnitude * direction / norms (Salimans 2016)."""
    axes = [axis for axis in range(len(shape_of(direction))) if axis != dim]
    norms = ops.cast(norms, dtype_of(grad))
    along = ops.emit(relax.op.sum(ops.multiply(grad, direction), axes, True))
    share = ops.divide(along, ops.multiply(norms, norms))
    across = ops.subtract(grad, ops.multiply(direction, share))
    return ops.multiply(ops.divide(magnitude, norms), across), ops.divide(along, norms)
