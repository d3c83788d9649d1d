# SPDX-License-Identifier: Apache-2.0
"""Padding rules of losses that pick a class: targets at padding are ignored ones.

The classes may be padded, as where places of a sequence, or rows of the batch, are what is chosen:
padding is hidden by a mask, and targets are places of data.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from amp_ir.padding import pad_range
from amp_ir.padding.axes import Axis, Limit, axis_of_sizes
from amp_ir.padding.pad_range import FINITE, ZERO, Range
from amp_ir.padding.padded_call import (
    Leak,
    PaddedCall,
    PaddedTensor,
    aligned,
    rule_for,
)


@rule_for("amp_ir.nll_loss")
def nll_loss(call: PaddedCall) -> list[PaddedTensor]:
    """Pick the log-probability of each target; targets at padding must be ignored ones."""
    logp, target = call.operands[:2]
    _require_classes(call, _class_axis(logp.axes))
    rows = _loss_rows(logp, target)
    chosen = pad_range.finite_of(logp.everything)
    axes = [
        tuple(one.with_pad(ZERO if _is_ignored(call, one.pad) else chosen) for one in axis)
        for axis in rows
    ]
    if str(call.option("reduction")) == "none":
        return [call.result(axes), call.result([], position=1)]
    for one in (factor for axis in target.axes for factor in axis):
        if one.is_padded and not _is_ignored(call, one.pad):
            raise Leak(
                f"the loss of padding counts: the targets there are not {_ignored(call)} "
                f"(ignore_index) over {one.name}. Give pad= that value for the labels"
            )
    return call.unpadded()


def _class_axis(axes: Sequence[Axis]) -> Axis:
    return axes[_place_of(axes)]


def _place_of(axes: Sequence[object]) -> int:
    """Return which axis the classes are, of those of log-probabilities."""
    return 1 if len(axes) > 1 else 0


def _require_classes(call: PaddedCall, classes: Axis) -> None:
    """Require that targets are data where the classes are padded; negative ones are ignored.

    Raises:
        Leak: they may not be.
    """
    if not any(one.is_padded for one in classes):
        return
    (factor,) = classes if len(classes) == 1 else (None,)
    if factor is None or factor.dimension is None:
        raise Leak("a loss has classes that are padded in an unknown way")
    if bool(call.option("has_weight")):
        raise Leak(f"a loss weights its classes, which are as many as {factor.name} is long")
    if not call.are_inside(1, Limit(factor.dimension, factor.shift), None):
        raise Leak(
            f"a loss has the classes {factor.name}, padding included, and its targets may be "
            "padding. Compute them from the batch alone"
        )


def _loss_rows(logp: PaddedTensor, target: PaddedTensor) -> list[Axis]:
    """Return the axes of the targets; those of log-probabilities have the classes besides."""
    rows = [axis for k, axis in enumerate(logp.axes) if k != _place_of(logp.axes)]
    rest = aligned([PaddedTensor(tuple(rows), FINITE, logp.dtype), target])
    return [axis or other or () for axis, other in zip(*reversed(rest), strict=True)]


def _ignored(call: PaddedCall) -> int:
    return int(call.option("ignore_index"))


def _is_ignored(call: PaddedCall, pad: Range) -> bool:
    return pad.constant == float(_ignored(call))


@rule_for("amp_ir.nll_loss_backward")
def nll_loss_backward(call: PaddedCall) -> PaddedTensor:
    """Give each row its gradient, 0 where the target is ignored."""
    grad, target = call.operands[:2]
    sizes = call.result_sizes[0]
    is_per_row = str(call.option("reduction")) == "none"
    rows: list[Axis] = []
    for k, axis in enumerate(target.axes):
        row = []
        for i, one in enumerate(axis):
            given = grad.axes[k][i].pad if is_per_row else FINITE
            is_zero = _is_ignored(call, one.pad) or given.is_zero
            row.append(one.with_pad(ZERO if is_zero else pad_range.finite_of(given)))
        rows.append(tuple(row))
    place = _place_of(sizes)
    classes = axis_of_sizes(sizes[place], call.dimensions, ZERO)
    if classes is None:
        raise Leak("the number of classes depends on the padded length")
    _require_classes(call, classes)
    # Targets at padding of the rows may be padding, and then have gradients unless ignored.
    has_zeros = all(one.pad.is_zero for axis in rows for one in axis if one.is_padded)
    classes = tuple(attrs.evolve(one, is_open=one.is_padded and not has_zeros) for one in classes)
    return call.result([*rows[:place], classes, *rows[place:]])
