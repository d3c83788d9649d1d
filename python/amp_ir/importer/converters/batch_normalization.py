# SPDX-License-Identifier: Apache-2.0
"""Batch normalization: one fused op in training, elementwise ops in inference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tvm import relax

from amp_ir.importer.converters.emitter import Emitter, dtype_name
from amp_ir.importer.converters.normalization import MaybeTensor, present, statistics, wanted_of
from amp_ir.importer.converters.promotion import dtype_of, shape_of
from amp_ir.importer.converters.registry import converts

aten = torch.ops.aten


@converts(aten._native_batch_norm_legit_functional.default)
def batch_norm(
    ops: Emitter,
    x: relax.Expr,
    weight: MaybeTensor,
    bias: MaybeTensor,
    running_mean: relax.Expr,
    running_var: relax.Expr,
    training: bool,
    momentum: float,
    eps: float,
) -> Sequence[relax.Expr]:
    """Return (y, save_mean, save_rstd, new running mean, new running variance)."""
    if not training:
        inference = _batch_norm_inference(ops, x, weight, bias, running_mean, running_var, eps)
        return [*inference, running_mean, running_var]
    return _batch_norm_training(ops, x, weight, bias, [running_mean, running_var], momentum, eps)


@converts(aten._native_batch_norm_legit.no_stats)
def batch_norm_without_running(
    ops: Emitter,
    x: relax.Expr,
    weight: MaybeTensor,
    bias: MaybeTensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Sequence[relax.Expr]:
    """Return (y, save_mean, save_rstd) of the batch, in training and outside of it."""
    return _batch_norm_training(ops, x, weight, bias, [], momentum, eps)


@converts(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def batch_norm_in_place(
    ops: Emitter,
    x: relax.Expr,
    weight: MaybeTensor,
    bias: MaybeTensor,
    running_mean: MaybeTensor,
    running_var: MaybeTensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Sequence[relax.Expr]:
    """Return (y, save_mean, save_rstd); outside of training PyTorch writes nothing else.

    In training these overloads also write the running statistics, which a functional graph
    cannot express; the capture uses the functional overload there.
    """
    if not training:
        return _batch_norm_inference(ops, x, weight, bias, running_mean, running_var, eps)
    if running_mean is not None:
        ops.reject("it writes its running statistics; the functional overload is needed")
    return _batch_norm_training(ops, x, weight, bias, [], momentum, eps)


def _batch_norm_training(
    ops: Emitter,
    x: relax.Expr,
    weight: MaybeTensor,
    bias: MaybeTensor,
    running: list[relax.Expr],
    momentum: float,
    eps: float,
) -> list[relax.Expr]:
    results = ops.call(
        "amp_ir.batch_norm",
        x,
        *present(weight, bias),
        *running,
        momentum=momentum,
        eps=eps,
        has_weight=weight is not None,
        has_bias=bias is not None,
        has_running=bool(running),
    )
    return statistics(ops, results, 1)


@converts(aten._native_batch_norm_legit_no_training.default)
def batch_norm_no_training(
    ops: Emitter,
    x: relax.Expr,
    weight: MaybeTensor,
    bias: MaybeTensor,
    running_mean: relax.Expr,
    running_var: relax.Expr,
    momentum: float,
    eps: float,
) -> Sequence[relax.Expr]:
    """Return (y, None, None) computed elementwise with the running statistics."""
    return _batch_norm_inference(ops, x, weight, bias, running_mean, running_var, eps)


def _per_channel(ops: Emitter, value: relax.Expr, rank: int) -> relax.Expr:
    """Return f[c] reshaped to broadcast along axis 1."""
    return ops.reshape(value, [1, *shape_of(value), *[1] * (rank - 2)])


def _batch_norm_inference(
    ops: Emitter,
    x: relax.Expr,
    weight: MaybeTensor,
    bias: MaybeTensor,
    mean: Any,
    variance: Any,
    eps: float,
) -> list[relax.Expr]:
    """Return y = x * scale + shift, scale and shift per channel, in the statistics' dtype."""
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
    weight: MaybeTensor,
    running_mean: MaybeTensor,
    running_var: MaybeTensor,
    save_mean: MaybeTensor,
    save_rstd: MaybeTensor,
    training: bool,
    eps: float,
    mask: Sequence[bool],
) -> tuple[MaybeTensor, ...]:
    """Return (dx, dweight, dbias), each where the mask requests it."""
    if training:
        values = ops.call(
            "amp_ir.batch_norm_backward",
            grad,
            x,
            *present(weight, save_mean, save_rstd),
            has_weight=weight is not None,
        )
        return wanted_of(ops, mask, *values)
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
    return wanted_of(ops, mask, dx, dweight, dbias)
