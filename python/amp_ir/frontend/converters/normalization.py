# SPDX-License-Identifier: Apache-2.0
"""Layer, RMS, group and batch normalization, kept whole; inference BatchNorm is elementwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tvm import relax

from amp_ir.frontend.converters.emitter import Emitter, dtype_name
from amp_ir.frontend.converters.promotion import dtype_of, shape_of
from amp_ir.frontend.converters.registry import converts

aten = torch.ops.aten
Optional = relax.Expr | None


def _present(*tensors: Optional) -> list[relax.Expr]:
    return [tensor for tensor in tensors if tensor is not None]


def _statistics(ops: Emitter, values: Sequence[relax.Expr], first: int) -> list[relax.Expr]:
    """The values from `first` on in the dtypes that PyTorch gives the node's results."""
    wanted = [dtype_name(one.dtype) for one in ops.result]
    return [
        ops.cast(ops.reshape(value, ops.result[i].shape), wanted[i]) if i >= first else value
        for i, value in enumerate(values)
    ]


@converts(aten.native_layer_norm.default)
def layer_norm(
    ops: Emitter,
    x: relax.Expr,
    normalized_shape: Sequence[int],
    weight: Optional,
    bias: Optional,
    eps: float,
) -> Sequence[relax.Expr]:
    """(y, mean, rstd)."""
    results = ops.call(
        "amp_ir.layer_norm",
        x,
        *_present(weight, bias),
        ndim_normalized=len(normalized_shape),
        eps=eps,
        has_weight=weight is not None,
        has_bias=bias is not None,
    )
    return _statistics(ops, results, 1)


@converts(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    ops: Emitter,
    grad: relax.Expr,
    x: relax.Expr,
    normalized_shape: Sequence[int],
    mean: relax.Expr,
    rstd: relax.Expr,
    weight: Optional,
    bias: Optional,
    mask: Sequence[bool],
) -> tuple[Optional, ...]:
    """(dx, dweight, dbias), each where the mask asks for it."""
    ndim = len(normalized_shape)
    dx = dweight = dbias = None
    if mask[0]:
        dx = ops.call(
            "amp_ir.layer_norm_backward_input",
            grad,
            x,
            mean,
            rstd,
            *_present(weight),
            ndim_normalized=ndim,
            has_weight=weight is not None,
        )
    if mask[1] or mask[2]:
        dweight, dbias = ops.call(
            "amp_ir.layer_norm_backward_weight", grad, x, mean, rstd, ndim_normalized=ndim
        )
    return _wanted(ops, mask, dx, dweight, dbias)


def _wanted(ops: Emitter, mask: Sequence[bool], *values: Optional) -> tuple[Optional, ...]:
    """The values that the mask asks for, in the dtypes of PyTorch's results."""
    return tuple(
        ops.cast(value, dtype_name(result.dtype)) if wanted and value is not None else None
        for wanted, value, result in zip(mask, values, ops.result, strict=True)
    )


@converts(aten._fused_rms_norm.default)
def rms_norm(
    ops: Emitter,
    x: relax.Expr,
    normalized_shape: Sequence[int],
    weight: Optional,
    eps: float | None,
) -> Sequence[relax.Expr]:
    """(y, rstd); eps None is the smallest step of the statistics' dtype."""
    statistic = dtype_name(ops.result[1].dtype)
    step = torch.finfo(torch.float64 if statistic == "float64" else torch.float32).eps
    results = ops.call(
        "amp_ir.rms_norm",
        x,
        *_present(weight),
        ndim_normalized=len(normalized_shape),
        eps=step if eps is None else eps,
        has_weight=weight is not None,
    )
    return _statistics(ops, results, 1)


@converts(aten._fused_rms_norm_backward.default)
def rms_norm_backward(
    ops: Emitter,
    grad: relax.Expr,
    x: relax.Expr,
    normalized_shape: Sequence[int],
    rstd: relax.Expr,
    weight: Optional,
    mask: Sequence[bool],
) -> tuple[Optional, ...]:
    """(dx, dweight)."""
    ndim = len(normalized_shape)
    dx = dweight = None
    if mask[0]:
        dx = ops.call(
            "amp_ir.rms_norm_backward_input",
            grad,
            x,
            rstd,
            *_present(weight),
            ndim_normalized=ndim,
            has_weight=weight is not None,
        )
    if mask[1]:
        dweight = ops.call("amp_ir.rms_norm_backward_weight", grad, x, rstd, ndim_normalized=ndim)
    return _wanted(ops, mask, dx, dweight)


@converts(aten.native_group_norm.default)
def group_norm(
    ops: Emitter,
    x: relax.Expr,
    weight: Optional,
    bias: Optional,
    _batch: int,
    _channels: int,
    _space: int,
    groups: int,
    eps: float,
) -> Sequence[relax.Expr]:
    """(y, mean, rstd)."""
    results = ops.call(
        "amp_ir.group_norm",
        x,
        *_present(weight, bias),
        groups=groups,
        eps=eps,
        has_weight=weight is not None,
        has_bias=bias is not None,
    )
    return _statistics(ops, results, 1)


@converts(aten.native_group_norm_backward.default)
def group_norm_backward(
    ops: Emitter,
    grad: relax.Expr,
    x: relax.Expr,
    mean: relax.Expr,
    rstd: relax.Expr,
    weight: Optional,
    _batch: int,
    _channels: int,
    _space: int,
    groups: int,
    mask: Sequence[bool],
) -> tuple[Optional, ...]:
    """(dx, dweight, dbias), each where the mask asks for it."""
    dx = dweight = dbias = None
    if mask[0]:
        dx = ops.call(
            "amp_ir.group_norm_backward_input",
            grad,
            x,
            mean,
            rstd,
            *_present(weight),
            groups=groups,
            has_weight=weight is not None,
        )
    if mask[1] or mask[2]:
        dweight, dbias = ops.call(
            "amp_ir.group_norm_backward_weight", grad, x, mean, rstd, groups=groups
        )
    return _wanted(ops, mask, dx, dweight, dbias)


@converts(aten._native_batch_norm_legit_functional.default)
def batch_norm(
    ops: Emitter,
    x: relax.Expr,
    weight: Optional,
    bias: Optional,
    running_mean: relax.Expr,
    running_var: relax.Expr,
    training: bool,
    momentum: float,
    eps: float,
) -> Sequence[relax.Expr]:
    """(y, save_mean, save_rstd, new running mean, new running variance)."""
    if not training:
        inference = _batch_norm_inference(ops, x, weight, bias, running_mean, running_var, eps)
        return [*inference, running_mean, running_var]
    return _batch_norm_training(ops, x, weight, bias, [running_mean, running_var], momentum, eps)


@converts(aten._native_batch_norm_legit.no_stats)
def batch_norm_without_running(
    ops: Emitter,
    x: relax.Expr,
    weight: Optional,
    bias: Optional,
    training: bool,
    momentum: float,
    eps: float,
) -> Sequence[relax.Expr]:
    """(y, save_mean, save_rstd) from the batch, which is used also outside of training."""
    return _batch_norm_training(ops, x, weight, bias, [], momentum, eps)


@converts(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def batch_norm_in_place(
    ops: Emitter,
    x: relax.Expr,
    weight: Optional,
    bias: Optional,
    running_mean: Optional,
    running_var: Optional,
    training: bool,
    momentum: float,
    eps: float,
) -> Sequence[relax.Expr]:
    """(y, save_mean, save_rstd), where PyTorch would write nothing else.

    In training these overloads also write the running statistics, which a functional graph
    cannot say; the capture uses the functional overload there.
    """
    if not training:
        return _batch_norm_inference(ops, x, weight, bias, running_mean, running_var, eps)
    if running_mean is not None:
        ops.refuse("it writes its running statistics; the functional overload is needed")
    return _batch_norm_training(ops, x, weight, bias, [], momentum, eps)


def _batch_norm_training(
    ops: Emitter,
    x: relax.Expr,
    weight: Optional,
    bias: Optional,
    running: list[relax.Expr],
    momentum: float,
    eps: float,
) -> list[relax.Expr]:
    results = ops.call(
        "amp_ir.batch_norm",
        x,
        *_present(weight, bias),
        *running,
        momentum=momentum,
        eps=eps,
        has_weight=weight is not None,
        has_bias=bias is not None,
        has_running=bool(running),
    )
    return _statistics(ops, results, 1)


@converts(aten._native_batch_norm_legit_no_training.default)
def batch_norm_no_training(
    ops: Emitter,
    x: relax.Expr,
    weight: Optional,
    bias: Optional,
    running_mean: relax.Expr,
    running_var: relax.Expr,
    momentum: float,
    eps: float,
) -> Sequence[relax.Expr]:
    """(y, nothing, nothing): with the running statistics, element by element."""
    return _batch_norm_inference(ops, x, weight, bias, running_mean, running_var, eps)


def _per_channel(ops: Emitter, value: relax.Expr, rank: int) -> relax.Expr:
    """f[c] shaped to broadcast along axis 1."""
    return ops.reshape(value, [1, *shape_of(value), *[1] * (rank - 2)])


def _batch_norm_inference(
    ops: Emitter,
    x: relax.Expr,
    weight: Optional,
    bias: Optional,
    mean: Any,
    variance: Any,
    eps: float,
) -> list[relax.Expr]:
    """y = x * scale + shift with per-channel scale and shift, in the statistics' dtype."""
    scale = ops.emit(relax.op.rsqrt(ops.add(variance, eps)))
    if weight is not None:
        scale = ops.multiply(scale, ops.cast(weight, dtype_of(scale)))
    rank = len(shape_of(x))
    wide = ops.cast(x, dtype_of(scale))
    centered = ops.subtract(wide, _per_channel(ops, mean, rank))
    y = ops.multiply(centered, _per_channel(ops, scale, rank))
    if bias is not None:
        y = ops.add(y, _per_channel(ops, ops.cast(bias, dtype_of(y)), rank))
    empty = [ops.full(one.shape, 0, dtype_name(one.dtype)) for one in list(ops.result)[1:3]]
    return [ops.cast(y, dtype_of(x)), *empty]


@converts(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    ops: Emitter,
    grad: relax.Expr,
    x: relax.Expr,
    weight: Optional,
    running_mean: Optional,
    running_var: Optional,
    save_mean: Optional,
    save_rstd: Optional,
    training: bool,
    eps: float,
    mask: Sequence[bool],
) -> tuple[Optional, ...]:
    """(dx, dweight, dbias), each where the mask asks for it."""
    if training:
        values = ops.call(
            "amp_ir.batch_norm_backward",
            grad,
            x,
            *_present(weight, save_mean, save_rstd),
            has_weight=weight is not None,
        )
        return _wanted(ops, mask, *values)
    assert running_mean is not None and running_var is not None
    rank = len(shape_of(x))
    rstd = ops.emit(relax.op.rsqrt(ops.add(running_var, eps)))
    scale = rstd if weight is None else ops.multiply(rstd, ops.cast(weight, dtype_of(rstd)))
    wide_grad = ops.cast(grad, dtype_of(rstd))
    axes = [0, *range(2, rank)]
    dx = dweight = dbias = None
    if mask[0]:
        dx = ops.multiply(wide_grad, _per_channel(ops, scale, rank))
    if mask[1]:
        centered = ops.subtract(ops.cast(x, dtype_of(rstd)), _per_channel(ops, running_mean, rank))
        product = ops.emit(relax.op.sum(ops.multiply(wide_grad, centered), axes))
        dweight = ops.multiply(product, rstd)
    if mask[2]:
        dbias = ops.emit(relax.op.sum(wide_grad, axes))
    return _wanted(ops, mask, dx, dweight, dbias)


@converts(aten._weight_norm_interface_backward.default)
def weight_norm_backward(
    ops: Emitter,
    grad: relax.Expr,
    direction: relax.Expr,
    magnitude: relax.Expr,
    norms: relax.Expr,
    dim: int,
) -> tuple[relax.Expr, relax.Expr]:
    """(ddirection, dmagnitude) of weight = magnitude * direction / norms (Salimans 2016)."""
    axes = [axis for axis in range(len(shape_of(direction))) if axis != dim]
    norms = ops.cast(norms, dtype_of(grad))
    along = ops.emit(relax.op.sum(ops.multiply(grad, direction), axes, True))
    share = ops.divide(along, ops.multiply(norms, norms))
    across = ops.subtract(grad, ops.multiply(direction, share))
    return ops.multiply(ops.divide(magnitude, norms), across), ops.divide(along, norms)
