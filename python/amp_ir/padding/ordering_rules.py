# SPDX-License-Identifier: Apache-2.0
"""Padding rules of sorting: equal elements stay in their order, so that padding that no data are
beyond comes last.
"""

from __future__ import annotations

import math

from amp_ir.padding.axes import Axis, Factor
from amp_ir.padding.index_rules import require_closed
from amp_ir.padding.limits import limit_of_places
from amp_ir.padding.pad_range import NOT_NEGATIVE, Range, negative
from amp_ir.padding.padded_call import (
    Leak,
    PaddedCall,
    PaddedTensor,
    require_outermost,
    rule_for,
)


@rule_for("relax.sort", "relax.argsort")
def sort(call: PaddedCall) -> PaddedTensor:
    """Order an axis; the places of data are places of data."""
    along = call.axis()
    _require_last(call, along, is_descending=bool(call.option("descending")))
    return _ordered(call, along, call.operands[0].axes[along], 0, "arg" in call.op.name)


@rule_for("relax.topk")
def topk(call: PaddedCall) -> list[PaddedTensor]:
    """Take the first k of an axis in order, of which there must be k data."""
    along, count = call.axis(), int(call.option("k"))
    _require_last(call, along, is_descending=bool(call.option("largest")))
    for one in call.operands[0].axes[along]:
        if one.dimension is not None:
            call.require_size(one.dimension, count - one.shift)
    taken = () if count == 1 else (Factor(count, count),)
    kind = str(call.option("ret_type"))
    wants = [True] if kind == "indices" else [False, True][: len(call.result_sizes)]
    return [_ordered(call, along, taken, k, is_place) for k, is_place in enumerate(wants)]


def _require_last(call: PaddedCall, along: int, *, is_descending: bool) -> None:
    """Require that no data come after the padding of an axis.

    Raises:
        Leak: some may.
    """
    (source,) = call.operands
    if not source.is_padded_on([along]):
        return
    require_outermost(source, [along], "elements are ordered along")
    require_closed([source])
    data = source.data if is_descending else negative(source.data)
    for one in source.axes[along]:
        pad = one.pad if is_descending else negative(one.pad)
        if one.is_padded and not _is_least(pad, data):
            first, last = ("largest", "-") if is_descending else ("smallest", "")
            raise Leak(
                f"elements over {one.name} are ordered, the {first} first, and padding may be "
                f"among those of data: fill it with {last}torch.inf"
            )


def _is_least(pad: Range, data: Range) -> bool:
    """Return whether no data are below padding: also not those that the same mask hides."""
    return not pad.has_nan and (pad.high == -math.inf or pad.high <= data.low)


def _ordered(
    call: PaddedCall, along: int, axis: Axis, position: int, is_place: bool
) -> PaddedTensor:
    """Return ordered elements, or their places, with this axis along which they are."""
    (source,) = call.operands
    size = max((math.prod(one) for one in zip(*_sizes(source.axes[along]), strict=True)), default=1)
    known = Range(0.0, size - 1.0)
    axes = [
        tuple(one.with_pad(known if is_place else one.pad) for one in (axis if k == along else own))
        for k, own in enumerate(source.axes)
    ]
    if not is_place:
        return call.result(axes, source.data, position)
    made = call.result(axes, NOT_NEGATIVE, position)
    factors = source.axes[along]
    limit = limit_of_places(factors[0]) if len(factors) == 1 else None
    return PaddedTensor(made.axes, known, made.dtype, limit=limit)


def _sizes(axis: Axis) -> list[tuple[int, int]]:
    return [(one.size, one.other_size) for one in axis]
