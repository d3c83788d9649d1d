# SPDX-License-Identifier: Apache-2.0
"""Padding rules of whole layers: embedding, normalization, attention, dropout, losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from amp_ir.padding import pad_range
from amp_ir.padding.axes import Axis
from amp_ir.padding.pad_range import ANY, BOOL, FINITE, NOT_NEGATIVE, ZERO, Range
from amp_ir.padding.padded_call import (
    Leak,
    PaddedCall,
    PaddedTensor,
    aligned,
    broadcast,
    require_data,
    require_zero,
    rule_for,
)


@rule_for("amp_ir.embedding")
def embedding(call: PaddedCall) -> PaddedTensor:
    """Read rows of a table; at padding any of them."""
    weight, ids = call.operands
    require_data(weight, [0, 1], "a table is indexed whose rows or columns follow")
    axes = [tuple(one.with_pad(FINITE) for one in axis) for axis in ids.axes]
    return call.result([*axes, weight.axes[1]])


@rule_for("amp_ir.embedding_backward")
def embedding_backward(call: PaddedCall) -> PaddedTensor:
    """Add gradients to rows; those at padding must be 0."""
    grad, ids = call.operands
    count = len(ids.axes)
    aligned([PaddedTensor(grad.axes[:count], FINITE, grad.dtype), ids])
    require_zero(grad, range(count), "gradients are added to rows of a table")
    return call.unpadded()[0]


@rule_for("amp_ir.layer_norm", "amp_ir.rms_norm")
def layer_norm(call: PaddedCall) -> list[PaddedTensor]:
    """Normalize the last axes, which must have no padding; rows of padding stay finite."""
    x = call.operands[0]
    count = len(x.axes) - int(call.option("ndim_normalized"))
    require_data(x, range(count, len(x.axes)), "normalizes over")
    if not float(call.option("eps")) > 0:
        raise Leak("eps is 0, so that a row of padding may divide by 0")
    rows = [
        tuple(one.with_pad(pad_range.finite_of(one.pad)) for one in axis) for axis in x.axes[:count]
    ]
    statistic: list[Axis] = [*rows, *[()] * (len(x.axes) - count)]
    # The mean, where there is one, and the inverse of the deviation.
    last = len(call.result_sizes) - 1
    others = [call.result(statistic, NOT_NEGATIVE if k == last else FINITE, k) for k in _rest(call)]
    return [call.result([*rows, *x.axes[count:]]), *others]


def _rest(call: PaddedCall) -> range:
    return range(1, len(call.result_sizes))


@rule_for("amp_ir.layer_norm_backward_input", "amp_ir.rms_norm_backward_input")
def layer_norm_backward_input(call: PaddedCall) -> PaddedTensor:
    """Apply a form that is linear in each row's gradient."""
    grad, x, *statistics = call.operands
    count = len(x.axes) - int(call.option("ndim_normalized"))
    require_data(x, range(count, len(x.axes)), "normalizes over")
    rows = statistics[: 1 if "rms" in call.op.name else 2]
    made = broadcast([grad, x, *rows], pad_range.linear_of, call.result_dtypes[0])
    return call.result(made.axes)


@rule_for("amp_ir.layer_norm_backward_weight", "amp_ir.rms_norm_backward_weight")
def layer_norm_backward_weight(call: PaddedCall) -> list[PaddedTensor]:
    """Add the gradients of rows; those at padding must be 0."""
    grad, x, *statistics = call.operands
    count = len(x.axes) - int(call.option("ndim_normalized"))
    made = broadcast([grad, x, *statistics], pad_range.linear_of, "float32")
    require_zero(made, range(count), "gradients of a normalization's weight are added")
    return call.unpadded()


@rule_for("amp_ir.dropout")
def dropout(call: PaddedCall) -> list[PaddedTensor]:
    """Set elements to 0 at random. Other ones than without padding, as often."""
    x = call.operands[0]
    value = x.pads_mapped(lambda a: ZERO if a.is_zero else pad_range.finite_of(a))
    mask = x.pads_mapped(lambda _a: BOOL, "bool")
    return [one.with_axes(one.axes, is_uniform=False) for one in (value, mask)]


@rule_for("amp_ir.random_uniform", "amp_ir.random_normal")
def random(call: PaddedCall) -> PaddedTensor:
    """Draw numbers. Other ones than without padding, of the same distribution."""
    return call.result(call.made())


@rule_for("amp_ir.attention")
def attention(call: PaddedCall) -> list[PaddedTensor]:
    """Attend to rows of k and v, of which the mask must hide those that are padding."""
    q, k, v = call.operands[:3]
    hidden = _check_attention(call, q, k, v)
    axes = [_pads_of(column, hidden) for column in _batch(call, (q, k, v))]
    out: list[Axis] = [*axes, _finite_axis(q.axes[-2], k, v), v.axes[-1]]
    # A row that sees nothing has the weights 0, so that nothing is NaN.
    return [call.result(out), call.result(out[:-1], position=1)]


@rule_for("amp_ir.attention_backward")
def attention_backward(call: PaddedCall) -> list[PaddedTensor]:
    """Compute gradients of q, k and v; the gradient of a row of padding must be 0."""
    grad, q, k, v, out, _lse = call.operands[:6]
    hidden = _check_attention(call, q, k, v)
    aligned([grad, out])
    is_finite = all(one.everything.is_finite for one in (q, k, v, out))
    if not is_finite or not hidden.is_finite:
        raise Leak("padding in q, k or v may be infinite or NaN")
    require_zero(grad, [len(grad.axes) - 2], "gradients of keys and values are added")
    columns = _batch(call, (grad, q, k, v))
    # A batch entry or a head whose gradient is 0 has gradients 0.
    axes = [
        tuple(
            one.with_pad(ZERO if column[0] and column[0][i].pad.is_zero else FINITE)
            for i, one in enumerate(next((axis for axis in column if axis), ()))
        )
        for column in columns
    ]
    dq: list[Axis] = [*axes, _zero_axis(q.axes[-2]), q.axes[-1]]
    # In a batch entry of padding the mask may hide nothing.
    dk: list[Axis] = [*axes, _zero_axis(k.axes[-2], is_open=True), k.axes[-1]]
    dv: list[Axis] = [*axes, _zero_axis(v.axes[-2], is_open=True), v.axes[-1]]
    return [call.result(one, position=i) for i, one in enumerate((dq, dk, dv))]


def _zero_axis(axis: Axis, *, is_open: bool = False) -> Axis:
    return tuple(
        attrs.evolve(one.with_pad(ZERO), is_open=is_open and one.is_padded) for one in axis
    )


def _finite_axis(axis: Axis, *others: PaddedTensor) -> Axis:
    rest = [one.everything for one in others]
    return tuple(one.with_pad(pad_range.finite_of(one.pad, *rest)) for one in axis)


def _pads_of(column: Sequence[Axis | None], hidden: Range) -> Axis:
    chosen = next((axis for axis in column if axis), ())
    pads = [[axis[i].pad for axis in column if axis] for i in range(len(chosen))]
    return tuple(
        one.with_pad(pad_range.finite_of(hidden, *found))
        for one, found in zip(chosen, pads, strict=True)
    )


def _batch(call: PaddedCall, tensors: Sequence[PaddedTensor]) -> list[tuple[Axis | None, ...]]:
    """Return the axes before the last two, of all tensors side by side."""
    rows = aligned([PaddedTensor(one.axes[:-2], FINITE, one.dtype) for one in tensors])
    return list(zip(*rows, strict=True))


def _check_attention(call: PaddedCall, q: PaddedTensor, k: PaddedTensor, v: PaddedTensor) -> Range:
    """Require that no row sees padding; return what is known of the mask.

    Raises:
        Leak: one may, or a width is padded.
    """
    require_data(q, [-1], "attention adds products over")
    require_data(v, [-1], "attention's values have the width")
    aligned([PaddedTensor((one.axes[-2],), FINITE, one.dtype) for one in (k, v)])
    position = 6 if "backward" in call.op.name else 3
    mask = call.operands[position] if call.option("has_mask") else None
    is_causal = bool(call.option("is_causal"))
    if mask is not None:
        columns = _batch(call, (q, k, v))
        batch = [next((axis for axis in column if axis), ()) for column in columns]
        scores = PaddedTensor((*batch, q.axes[-2], k.axes[-2]), FINITE, q.dtype)
        aligned([scores, mask])
    for one in k.axes[-2]:
        if not one.is_padded:
            continue
        same = [factor.kind for factor in q.axes[-2]] == [factor.kind for factor in k.axes[-2]]
        if not (is_causal and same) and not _is_masked(mask, one.kind):
            raise Leak(
                f"attention sees the padding of {one.name}: no mask hides it. Pass an "
                "attention mask, and give pad= the value of its padding"
            )
        if not (k.everything.is_finite and v.everything.is_finite):
            raise Leak("padding in keys or values may be infinite or NaN, also where it is masked")
    # Numbers of -inf hide what they are added to; others must be finite.
    return FINITE if mask is None or not mask.everything.has_nan else ANY


def _is_masked(mask: PaddedTensor | None, kind: object) -> bool:
    """Return whether a mask hides the padding of its last axis."""
    if mask is None or not mask.axes or len(mask.axes[-1]) != 1:
        return False
    (factor,) = mask.axes[-1]
    is_hidden = factor.pad.is_zero if mask.dtype == "bool" else factor.pad.is_hidden
    return factor.kind == kind and is_hidden


_POINTWISE = (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss".split()
)


# Those that are 0, with a slope of 0, where both numbers are the same.
_OF_DIFFERENCES = "mse_loss l1_loss smooth_l1_loss huber_loss".split()


def _loss_of_pair(call: PaddedCall) -> Callable[[Range, Range], Range]:
    """Return the range of a loss, or of its slope, by those of its two numbers."""
    is_of_difference = call.op.name.removesuffix("_backward")[7:] in _OF_DIFFERENCES

    def loss(a: Range, b: Range) -> Range:
        is_same = a.is_finite and a.constant is not None and a.constant == b.constant
        return ZERO if is_of_difference and is_same else pad_range.finite_of(a, b)

    return loss


@rule_for(*(f"amp_ir.{name}" for name in _POINTWISE))
def pointwise_loss(call: PaddedCall) -> PaddedTensor:
    """Compare numbers one by one; a mean must not see padding, and a sum only zeros."""
    made = broadcast(call.operands, _loss_of_pair(call), call.result_dtypes[0])
    reduction = str(call.option("reduction"))
    if reduction == "none":
        return call.result(made.axes)
    if reduction == "sum":
        require_zero(made, range(len(made.axes)), "losses are added")
    else:
        require_data(made, range(len(made.axes)), f"a loss is reduced to its {reduction} over")
    return call.unpadded()[0]


@rule_for(*(f"amp_ir.{name}_backward" for name in _POINTWISE))
def pointwise_loss_backward(call: PaddedCall) -> PaddedTensor:
    """Multiply the gradient by the slope of each number."""
    grad, *others = call.operands
    slope = _loss_of_pair(call)
    if str(call.option("reduction")) not in ("none", "sum"):
        made = broadcast(others, slope, call.result_dtypes[0])
        require_data(made, range(len(made.axes)), "a loss is reduced over")
        return call.unpadded()[0]
    return broadcast(
        [grad, *others],
        lambda g, a, b: pad_range.linear_of(g, a, b) if g.is_zero else _times(g, slope(a, b)),
        call.result_dtypes[0],
    )


def _times(gradient: Range, slope: Range) -> Range:
    return pad_range.linear_of(slope, gradient)
