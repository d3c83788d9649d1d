# SPDX-License-Identifier: Apache-2.0
"""Losses that the capture does not decompose, and their gradients."""

from __future__ import annotations

import math

import torch
from tvm import relax

from amp_ir.importer.converters.emitter import Emitter, dtype_name
from amp_ir.importer.converters.promotion import Scalar, dtype_of, promoted_dtype, shape_of
from amp_ir.importer.converters.registry import Converter, converts

aten = torch.ops.aten

# ATen's numbers for `reduction`.
REDUCTIONS = ("none", "mean", "sum")


def _loss(
    ops: Emitter,
    name: str,
    pred: relax.Expr,
    target: relax.Expr,
    reduction: int,
    **options: float,
) -> relax.Expr:
    """Return one pointwise loss; pred and target get one shape and dtype first."""
    pred, target = _alike(ops, pred, target)
    result: relax.Expr = ops.call(name, pred, target, reduction=REDUCTIONS[reduction], **options)
    return ops.cast(result, ops.dtype)


def _loss_gradient(
    ops: Emitter,
    name: str,
    tensors: tuple[relax.Expr, relax.Expr, relax.Expr],
    reduction: int,
    **options: float,
) -> relax.Expr:
    """Return the gradient of a pointwise loss, for `tensors` = (grad, pred, target)."""
    grad, pred, target = tensors
    pred, target = _alike(ops, pred, target)
    shape = shape_of(pred)
    grad = ops.cast(grad, ops.dtype)
    if reduction != 0 and shape_of(grad):
        # The second derivative by the gradient of a loss is this op, too: PyTorch gives it one
        # number an element, and sums the result afterwards.
        if reduction == 1:
            grad = ops.multiply(grad, 1 / max(math.prod(shape), 1))
        reduction = 0
    grad = ops.broadcast(grad, shape if reduction == 0 else ())
    result: relax.Expr = ops.call(
        name, grad, pred, target, reduction=REDUCTIONS[reduction], **options
    )
    return ops.cast(result, ops.dtype)


def _alike(ops: Emitter, pred: relax.Expr, target: relax.Expr) -> tuple[relax.Expr, relax.Expr]:
    dtype = promoted_dtype(pred, target)
    shape = torch.broadcast_shapes(shape_of(pred), shape_of(target))
    return (
        ops.broadcast(ops.cast(pred, dtype), shape),
        ops.broadcast(ops.cast(target, dtype), shape),
    )


def _pairwise(name: str, option: str | None) -> tuple[Converter, Converter]:
    """Return the converters of a loss and of its gradient; `option` is its number, if it has one.

    PyTorch's default for the number of each of them is 1.
    """

    def options(number: float) -> dict[str, float]:
        return {} if option is None else {option: float(number)}

    def loss(
        ops: Emitter,
        pred: relax.Expr,
        target: relax.Expr,
        reduction: int = 1,
        number: float = 1.0,
    ) -> relax.Expr:
        return _loss(ops, name, pred, target, reduction, **options(number))

    def gradient(
        ops: Emitter,
        grad: relax.Expr,
        pred: relax.Expr,
        target: relax.Expr,
        reduction: int,
        number: float = 1.0,
    ) -> relax.Expr:
        tensors = grad, pred, target
        return _loss_gradient(ops, f"{name}_backward", tensors, reduction, **options(number))

    return loss, gradient


for _overload, _backward, _name, _option in (
    (aten.mse_loss, aten.mse_loss_backward, "amp_ir.mse_loss", None),
    (aten.soft_margin_loss, aten.soft_margin_loss_backward, "amp_ir.soft_margin_loss", None),
    (aten.smooth_l1_loss, aten.smooth_l1_loss_backward, "amp_ir.smooth_l1_loss", "beta"),
    (aten.huber_loss, aten.huber_loss_backward, "amp_ir.huber_loss", "delta"),
):
    _loss_converter, _gradient_converter = _pairwise(_name, _option)
    converts(_overload.default)(_loss_converter)
    converts(_backward.default)(_gradient_converter)


@converts(aten.binary_cross_entropy.default)
def binary_cross_entropy(
    ops: Emitter,
    pred: relax.Expr,
    target: relax.Expr,
    weight: relax.Expr | None = None,
    reduction: int = 1,
) -> relax.Expr:
    """Return the cross entropy of probabilities; a weight multiplies each element's loss."""
    name = "amp_ir.binary_cross_entropy"
    if weight is None:
        return _loss(ops, name, pred, target, reduction)
    values = ops.multiply(ops.call(name, pred, target, reduction="none"), weight)
    if reduction == 0:
        return values
    axes = list(range(len(shape_of(values))))
    return ops.emit((relax.op.mean if reduction == 1 else relax.op.sum)(values, axes))


@converts(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(
    ops: Emitter,
    grad: relax.Expr,
    pred: relax.Expr,
    target: relax.Expr,
    weight: relax.Expr | None = None,
    reduction: int = 1,
) -> relax.Expr:
    """Return the gradient of binary_cross_entropy."""
    name = "amp_ir.binary_cross_entropy_backward"
    dx = _loss_gradient(ops, name, (grad, pred, target), reduction)
    return dx if weight is None else ops.multiply(dx, weight)


@converts(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(
    ops: Emitter,
    logp: relax.Expr,
    target: relax.Expr,
    weight: relax.Expr | None,
    reduction: int,
    ignore_index: int,
) -> tuple[relax.Expr, relax.Expr]:
    """Return (the negative log-likelihood, the total weight)."""
    loss, total = ops.call(
        "amp_ir.nll_loss",
        logp,
        _of_shape(ops, target, logp),
        *([] if weight is None else [weight]),
        reduction=REDUCTIONS[reduction],
        ignore_index=ignore_index,
        has_weight=weight is not None,
    )
    wanted = ops.result[1].dtype
    return ops.reshape(loss, ops.result[0].shape), ops.cast(total, dtype_name(wanted))


def _of_shape(ops: Emitter, target: relax.Expr, logp: relax.Expr) -> relax.Expr:
    """Return the target without the axis of extent 1 that PyTorch allows for a single sample."""
    shape = shape_of(logp)
    return ops.reshape(target, shape[:1] + shape[2:] if len(shape) > 1 else ())


@converts(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    ops: Emitter,
    grad: relax.Expr,
    logp: relax.Expr,
    target: relax.Expr,
    weight: relax.Expr | None,
    reduction: int,
    ignore_index: int,
    total_weight: relax.Expr,
) -> relax.Expr:
    """Return the gradient of the log-probabilities."""
    target = _of_shape(ops, target, logp)
    result: relax.Expr = ops.call(
        "amp_ir.nll_loss_backward",
        ops.reshape(grad, shape_of(target) if reduction == 0 else ()),
        target,
        total_weight,
        *([] if weight is None else [weight]),
        input_shape=shape_of(logp),
        reduction=REDUCTIONS[reduction],
        ignore_index=ignore_index,
        has_weight=weight is not None,
        dtype=dtype_of(logp),
    )
    return result


@converts(aten.multi_margin_loss_backward.default)
def multi_margin_loss_backward(
    ops: Emitter,
    grad: relax.Expr,
    x: relax.Expr,
    target: relax.Expr,
    p: Scalar,
    margin: Scalar,
    weight: relax.Expr | None = None,
    reduction: int = 1,
) -> relax.Expr:
    """Return the gradient of sum over j != t of max(0, margin - x[t] + x[j]) ** p / classes."""
    shape = shape_of(x)
    rows, classes = ([1, *shape] if len(shape) == 1 else shape)[-2:]
    x, target = ops.reshape(x, [rows, classes]), ops.reshape(target, [rows, 1])
    is_target = ops.binary(
        relax.op.equal, ops.emit(relax.op.arange(classes, dtype="int64")), target
    )
    own = ops.emit(relax.op.gather_elements(x, target, 1))
    excess = ops.add(ops.subtract(x, own), float(margin))
    slope = excess if p == 2 else ops.constant(0.5, dtype_of(x))
    counts = ops.binary(relax.op.greater, excess, 0)
    counts = ops.emit(relax.op.logical_and(counts, ops.emit(relax.op.logical_not(is_target))))
    others = ops.multiply(ops.where(counts, slope, 0.0), 2.0 / classes)
    total = ops.emit(relax.op.sum(others, [1], True))
    dx = ops.where(is_target, ops.emit(relax.op.negative(total)), others)
    if weight is not None:
        dx = ops.multiply(dx, ops.emit(relax.op.take(weight, target, 0)))
    share = ops.divide(grad, float(rows)) if reduction == 1 else grad
    share = ops.reshape(share, [rows, 1]) if reduction == 0 else share
    return ops.reshape(ops.multiply(dx, share), shape)
