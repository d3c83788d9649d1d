# SPDX-License-Identifier: Apache-2.0
"""Lowering of the nll loss: a gather and a sum; its gradient is written where the class is hit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx

from amp_ir.dialect.losses import class_axis
from amp_ir.loops import math as m
from amp_ir.loops.body_context import let
from amp_ir.loops.builders import pointwise, reduce
from amp_ir.loops.ir import Buffer, Element, Pointwise, Value, compute_dtype
from amp_ir.loops.lowering_registry import Lowering, lowers
from amp_ir.loops.lowerings.activations import sum_all
from amp_ir.loops.lowerings.gather import row_index


def _weight_of(
    target: Value, weight: Sequence[Value], classes: int, ignore_index: int, dtype: str
) -> Value:
    """Return the weight of each target: 0 for the ignored, 1 without weights."""

    def body(*i: Any) -> Any:
        element = let(target[i])
        one = weight[0][(row_index(element, classes),)] if weight else m.constant(1.0, dtype)
        ignored = element == m.constant(ignore_index, m.dtype_of(element))
        return m.select(ignored, m.constant(0.0, dtype), m.cast(one, dtype))

    return pointwise(target.shape, dtype, body)


def _picked(logp: Value, target: Value, axis: int, dtype: str) -> Element:
    """Return the element of `logp` at each target's class.

    Read from memory if it is stored; else picked as `logp` is computed, a sum with one term, so
    that it never needs memory: over a large vocabulary that would be the largest tensor of a step.
    """
    classes = logp.shape[axis]
    if isinstance(logp, Buffer):
        return lambda *i: logp[(*i[:axis], row_index(target[i], classes), *i[axis:])]

    parts = logp.log_softmax if isinstance(logp, Pointwise) else None
    if parts is not None and parts.axis != axis:
        parts = None
    source = logp if parts is None else parts.scores

    def term(*i: Any) -> Any:
        hit = tirx.EQ(tirx.Cast("int32", target[(*i[:axis], *i[axis + 1 :])]), i[axis])
        return m.select(hit, m.rounded(source[i]), m.constant(0.0, dtype))

    total = reduce("sum", logp.shape, (axis,), term, dtype)
    if parts is not None:
        # In the pass over the scores that finds their maximum, not in one after their sum.
        scores, peak, log_total = total, parts.peak, parts.log_total
        total = pointwise(total.shape, dtype, lambda *i: scores[i] - peak[i] - log_total[i])
    return lambda *i: total[(*i[:axis], 0, *i[axis:])]


@lowers("amp_ir.nll_loss")
def nll_loss(
    op: Lowering,
    logp: Value,
    target: Value,
    *weight: Value,
    reduction: str,
    ignore_index: int = -100,
    has_weight: bool = False,
) -> tuple[Value, Value]:
    """Compute -weight[target] * logp[target], then two sums."""
    result, dtype = op.results[0], compute_dtype(logp.dtype)
    axis = class_axis(logp.shape)
    classes = logp.shape[axis]
    weights = _weight_of(target, weight, classes, ignore_index, dtype)

    picked = _picked(logp, target, axis, dtype)

    def body(*i: Any) -> Any:
        value = -weights[i] * picked(*i)
        # 0 * inf would be NaN for an ignored target; for a class of weight 0 it is, in PyTorch.
        ignored = target[i] == m.constant(ignore_index, target.dtype)
        return m.select(ignored, m.constant(0.0, dtype), value)

    total_weight = sum_all(target.shape, dtype, lambda *i: weights[i])
    if reduction == "none":
        return pointwise(target.shape, result.dtype, body), total_weight
    total = sum_all(target.shape, dtype, body)
    if reduction == "sum":
        return pointwise((), result.dtype, lambda *i: total[i]), total_weight
    return pointwise((), result.dtype, lambda *i: total[i] / total_weight[i]), total_weight


@lowers("amp_ir.nll_loss_backward")
def nll_loss_backward(
    op: Lowering,
    grad: Value,
    target: Value,
    total_weight: Value,
    *weight: Value,
    input_shape: Sequence[int],
    reduction: str,
    ignore_index: int = -100,
    has_weight: bool = False,
    dtype: str | None = None,
) -> Value:
    """Compute -grad * weight[target] / total_weight where the class is the target's, else 0."""
    wide = compute_dtype(grad.dtype)
    axis = class_axis(tuple(input_shape))
    weights = _weight_of(target, weight, input_shape[axis], ignore_index, wide)

    def share_of(*i: Any) -> Any:
        share = -grad[i] * weights[i]
        if reduction == "mean":
            share = share / m.cast(total_weight[i], wide)
        ignored = target[i] == m.constant(ignore_index, target.dtype)
        return m.select(ignored, m.constant(0.0, wide), share)

    share = pointwise(target.shape, wide, share_of)

    def body(*i: Any) -> Any:
        place = (*i[:axis], *i[axis + 1 :])
        hit = tirx.Cast("int32", target[place]) == i[axis]
        return m.select(hit, share[place], m.constant(0.0, wide))

    result = pointwise(input_shape, op.results[0].dtype, body)
    if result.dtype == wide:
        result.one_hot = (axis, share)
    return result
