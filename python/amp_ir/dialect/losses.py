# SPDX-License-Identifier: Apache-2.0
"""Losses: one table of pointwise ones, name -> (value, gradient), and the nll loss.

Formulas are as in activations.py. Each row makes two ops:

    <name>(pred f[...], target f[...], *, reduction, ...) -> f[] or f[...] for "none"
    <name>_backward(grad f[] or f[...], pred, target, *, reduction, ...) -> f[...]

`reduction` is "none", "mean" or "sum"; sums are float32.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import attrs
import torch

from amp_ir.dialect import torch_math
from amp_ir.dialect.define import Shape, Tensor, check_choice, define, expect_rest
from amp_ir.errors import ArgumentError

REDUCTIONS = ("none", "mean", "sum")


@attrs.frozen
class Loss:
    """`value(m, pred, target, **options)`; `slope` is its derivative with respect to pred."""

    value: Callable[..., Any]
    slope: Callable[..., Any]


def _smooth_l1(m: Any, pred: Any, target: Any, *, beta: float) -> Any:
    distance = m.absolute(pred - target)
    if beta == 0.0:
        return distance
    return m.select(distance < beta, distance * distance * (0.5 / beta), distance - 0.5 * beta)


def _smooth_l1_slope(m: Any, pred: Any, target: Any, *, beta: float) -> Any:
    if beta == 0.0:
        return _sign(m, pred - target)
    if math.isinf(beta):
        distance = pred - target
        return m.select(m.absolute(distance) < beta, 0.0, _sign(m, distance))
    return m.maximum(m.minimum((pred - target) * (1.0 / beta), 1.0), -1.0)


def _sign(m: Any, x: Any) -> Any:
    return m.select(x > 0.0, 1.0, m.select(x < 0.0, -1.0, x))


def _huber(m: Any, pred: Any, target: Any, *, delta: float) -> Any:
    distance = m.absolute(pred - target)
    return m.select(distance < delta, 0.5 * distance * distance, delta * (distance - 0.5 * delta))


def _cross_entropy(m: Any, pred: Any, target: Any) -> Any:
    """Compute binary cross entropy with logarithms above -100, as PyTorch: errors stay finite."""
    yes, no = m.maximum(m.log(pred), -100.0), m.maximum(m.log1p(-pred), -100.0)
    return (target - 1.0) * no - target * yes


def _sigmoid(m: Any, x: Any) -> Any:
    """Return sigmoid(x) from e^-|x|, which does not overflow and keeps the smallest numbers."""
    z = m.exp(-m.absolute(x))
    return m.select(x < 0.0, z / (1.0 + z), 1.0 / (1.0 + z))


LOSSES: dict[str, Loss] = {
    "mse_loss": Loss(
        lambda m, pred, target: (pred - target) * (pred - target),
        lambda m, pred, target: 2.0 * (pred - target),
    ),
    "l1_loss": Loss(
        lambda m, pred, target: m.absolute(pred - target),
        lambda m, pred, target: _sign(m, pred - target),
    ),
    "smooth_l1_loss": Loss(_smooth_l1, _smooth_l1_slope),
    "huber_loss": Loss(
        _huber,
        lambda m, pred, target, *, delta: m.maximum(m.minimum(pred - target, delta), -delta),
    ),
    "binary_cross_entropy": Loss(
        _cross_entropy,
        lambda m, pred, target: (pred - target) / m.maximum((1.0 - pred) * pred, 1e-12),
    ),
    "soft_margin_loss": Loss(
        lambda m, pred, target: m.log1p(m.exp(-target * pred)),
        lambda m, pred, target: -target * _sigmoid(m, -target * pred),
    ),
}


def reduce_loss(values: torch.Tensor, reduction: str) -> torch.Tensor:
    """Reduce a tensor of losses as `reduction` says."""
    if reduction == "none":
        return values
    return values.mean() if reduction == "mean" else values.sum()


def _share(grad: torch.Tensor, reduction: str, count: int) -> torch.Tensor:
    return grad / count if reduction == "mean" else grad


def _check(op: str, tensors: tuple[Tensor, ...], reduction: str) -> None:
    check_choice(op, "reduction", reduction, REDUCTIONS)
    for tensor in tensors:
        tensor.expect_float()
    pred, target = tensors[-2:]
    target.expect_shape(pred.shape)
    if len(tensors) == 3:
        tensors[0].expect_shape(pred.shape if reduction == "none" else ())


def _signature_of(formula: Callable[..., Any]) -> inspect.Signature:
    """Return a signature with any tensors, `reduction` and the formula's own options."""
    parameter = inspect.Parameter
    options = [
        one
        for one in inspect.signature(formula).parameters.values()
        if one.kind is parameter.KEYWORD_ONLY
    ]
    return inspect.Signature(
        [
            parameter("tensors", parameter.VAR_POSITIONAL),
            parameter("reduction", parameter.KEYWORD_ONLY),
            *options,
        ]
    )


def _define_loss(name: str, loss: Loss) -> None:
    def forward(*tensors: torch.Tensor, reduction: str, **options: Any) -> torch.Tensor:
        return reduce_loss(loss.value(torch_math, *tensors, **options), reduction)

    def backward(
        grad: torch.Tensor,
        pred: torch.Tensor,
        target: torch.Tensor,
        *,
        reduction: str,
        **options: Any,
    ) -> torch.Tensor:
        slope = loss.slope(torch_math, pred, target, **options)
        return _share(grad, reduction, pred.numel()) * slope

    def rule(*tensors: Tensor, reduction: str, **options: Any) -> Tensor:
        _check(f"amp_ir.{name}", tensors, reduction)
        return tensors[0].with_shape(tensors[0].shape if reduction == "none" else ())

    def rule_backward(*tensors: Tensor, reduction: str, **options: Any) -> Tensor:
        _check(f"amp_ir.{name}_backward", tensors, reduction)
        return tensors[0].with_shape(tensors[1].shape)

    rule.__doc__ = "pred f[...], target f[...] -> f[], or f[...] for reduction none."
    rule_backward.__doc__ = "grad f[] (f[...] for none), pred f[...], target f[...] -> f[...]."
    signature = _signature_of(loss.value)
    rule.__signature__ = rule_backward.__signature__ = signature  # type: ignore[attr-defined]
    define(f"amp_ir.{name}", "pred", "target", reference=forward)(rule)
    define(f"amp_ir.{name}_backward", "grad", "pred", "target", reference=backward)(rule_backward)


for _name, _loss in LOSSES.items():
    _define_loss(_name, _loss)


def _weights(
    target: torch.Tensor, weight: tuple[torch.Tensor, ...], ignore_index: int, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (class numbers safe to index with, weight of each target; 0 for the ignored)."""
    kept = target != ignore_index
    classes = torch.where(kept, target, 0).long()
    weights = weight[0][classes] if weight else torch.ones_like(classes, dtype=like.dtype)
    return classes, torch.where(kept, weights, 0.0)


def class_axis(shape: Shape) -> int:
    """Return the axis of classes: 1 in a batch, 0 in a single sample."""
    return 1 if len(shape) > 1 else 0


def _nll_loss(
    logp: torch.Tensor,
    target: torch.Tensor,
    *weight: torch.Tensor,
    reduction: str,
    ignore_index: int,
    has_weight: bool,
) -> tuple[torch.Tensor, ...]:
    classes, weights = _weights(target, weight, ignore_index, logp)
    axis = class_axis(tuple(logp.shape))
    picked = logp.gather(axis, classes.unsqueeze(axis)).squeeze(axis)
    # An ignored target has no loss, also where its class has none that is a number.
    values = torch.where(target != ignore_index, -weights * picked, 0.0)
    total = weights.sum()
    if reduction == "none":
        return values, total
    return (values.sum() / total if reduction == "mean" else values.sum()), total


def _check_target(
    op: str, shape: Shape, target: Tensor, weight: tuple[Tensor, ...], has_weight: bool
) -> None:
    target.expect_index()
    if not shape:
        raise ArgumentError(f"{op}: log-probabilities have shape (), expected an axis of classes")
    axis = class_axis(shape)
    target.expect_shape(shape[:axis] + shape[axis + 1 :])
    expect_rest(weight, {"has_weight": has_weight}, (shape[axis],), op)


@define("amp_ir.nll_loss", "logp", "target", "weight?", reference=_nll_loss)
def nll_loss(
    logp: Tensor,
    target: Tensor,
    *weight: Tensor,
    reduction: str,
    ignore_index: int = -100,
    has_weight: bool = False,
) -> tuple[Tensor, ...]:
    """Compute the negative log-likelihood.

    logp f[n, classes, *space] (or f[classes]), target int[n, *space], weight f[classes]
    -> (loss f[] or f[n, *space], total_weight f32[]). The mean is over the total weight; it is
    NaN when every target is ignored, as in PyTorch.
    """
    op = "amp_ir.nll_loss"
    logp.expect_float()
    check_choice(op, "reduction", reduction, REDUCTIONS)
    _check_target(op, logp.shape, target, weight, has_weight)
    shape = target.shape if reduction == "none" else ()
    return logp.with_shape(shape), Tensor((), logp.statistic_dtype)


def _nll_loss_backward(
    grad: torch.Tensor,
    target: torch.Tensor,
    total_weight: torch.Tensor,
    *weight: torch.Tensor,
    input_shape: Shape,
    reduction: str,
    ignore_index: int,
    has_weight: bool,
    dtype: str | None,
) -> torch.Tensor:
    classes, weights = _weights(target, weight, ignore_index, grad)
    axis = class_axis(input_shape)
    share = grad / total_weight if reduction == "mean" else grad
    # An ignored target has no gradient, also when 0 / 0 makes the share NaN.
    values = torch.where(target != ignore_index, -share * weights, 0.0)
    zeros = torch.zeros(input_shape, dtype=values.dtype)
    return zeros.scatter_(axis, classes.unsqueeze(axis), values.unsqueeze(axis))


@define(
    "amp_ir.nll_loss_backward", "grad", "target", "total_weight", "weight?",
    reference=_nll_loss_backward,
)  # fmt: skip
def nll_loss_backward(
    grad: Tensor,
    target: Tensor,
    total_weight: Tensor,
    *weight: Tensor,
    input_shape: Shape,
    reduction: str,
    ignore_index: int = -100,
    has_weight: bool = False,
    dtype: str | None = None,
) -> Tensor:
    """Return dlogp f[*input_shape] of nll_loss, in `dtype` (by default that of grad).

    grad f[] (f[n, *space] for "none"), target int[n, *space], total_weight f[], weight f[classes].
    """
    op = "amp_ir.nll_loss_backward"
    grad.expect_float()
    check_choice(op, "reduction", reduction, REDUCTIONS)
    _check_target(op, tuple(input_shape), target, weight, has_weight)
    grad.expect_shape(target.shape if reduction == "none" else ())
    total_weight.expect_float()
    total_weight.expect_shape(())
    return Tensor(tuple(input_shape), dtype or grad.dtype)
