# SPDX-License-Identifier: Apache-2.0
"""Padding rules of ops that read or write at the places that a tensor says.

A padded axis is read and written by its own indices, in order, or at places that are known to be
data: below n, and not negative, which counts from the end of the padding.
"""

from __future__ import annotations

from collections.abc import Sequence

from amp_ir.padding import pad_range
from amp_ir.padding.axes import Axis, Factor, Limit, merged
from amp_ir.padding.pad_range import FINITE, ZERO, Range
from amp_ir.padding.padded_call import (
    Leak,
    PaddedCall,
    PaddedTensor,
    aligned,
    broadcast,
    rule_for,
)


@rule_for("relax.gather_elements")
def gather_elements(call: PaddedCall) -> PaddedTensor:
    """Read, at each place, an entry of the same row."""
    source, ids = call.operands
    along = call.axis()
    _require_inside(call, 1, source, along)
    if not source.padded:
        axes = [tuple(one.with_pad(source.data) for one in axis) for axis in ids.axes]
        return PaddedTensor(tuple(axes), source.data, call.result_dtypes[0], limit=source.limit)
    rest = [_without(one, along) for one in (source, ids)]
    made = broadcast(rest, lambda a, _b: a, call.result_dtypes[0])
    axes = list(made.axes)
    is_order = _is_order(call, 1, along)
    axes[along] = tuple(
        one.with_pad(own.pad if is_order else source.everything)
        for one, own in zip(
            ids.axes[along], source.axes[along] if is_order else ids.axes[along], strict=True
        )
    )
    return PaddedTensor(tuple(axes), source.data, call.result_dtypes[0], limit=source.limit)


@rule_for("relax.take")
def take(call: PaddedCall) -> PaddedTensor:
    """Read entries of a table without padding."""
    source, ids = call.operands
    along = call.axis()
    if source.padded:
        raise Leak("entries of a padded tensor are chosen by number")
    chosen = [tuple(one.with_pad(source.data) for one in axis) for axis in ids.axes]
    return call.result([*source.axes[:along], *chosen, *source.axes[along + 1 :]], source.data)


@rule_for("amp_ir.index")
def index(call: PaddedCall) -> PaddedTensor:
    """Read entries; at padding of the indices any of them."""
    source, *ids = call.operands
    axes = [int(one) for one in call.option("axes")]
    shape = [
        tuple(factor.with_pad(source.everything) for factor in axis)
        for axis in _broadcast_axes(ids)
    ]
    for k, at in _own_places(call, source, ids, first=1).items():
        shape[at] = source.axes[k]
    place = _place_of(axes)
    rest = [axis for k, axis in enumerate(source.axes) if k not in axes]
    found = [merged(axis) for axis in (*rest[:place], *shape, *rest[place:])]
    own_index = None
    for k, one in zip(axes, ids, strict=True):
        if k == source.index_axis and one.index_axis is not None:
            # The indices of indices are the indices.
            own_index = place + len(shape) - len(one.axes) + one.index_axis
    made = call.result(found, source.data)
    return made.with_axes(made.axes, index_axis=own_index, limit=source.limit)


@rule_for("amp_ir.index_put")
def index_put(call: PaddedCall) -> PaddedTensor:
    """Write entries: padding to padding, or nothing but zeros that are added."""
    x, values, *ids = call.operands
    if not any(one.padded for one in call.operands):
        return call.unpadded()[0]
    require_closed(call.operands)
    axes = [int(one) for one in call.option("axes")]
    shape, place = _broadcast_axes(ids), _place_of(axes)
    own = _own_places(call, x, ids, first=2)
    rest = [axis for k, axis in enumerate(x.axes) if k not in axes]
    written = PaddedTensor((*rest[:place], *shape, *rest[place:]), FINITE, x.dtype)
    if len(values.axes) != len(written.axes):
        raise Leak("what is written lacks axes of the places where it is written")
    aligned([values, written])
    for k in range(len(shape)):
        if k not in own.values() and written.is_padded_on([place + k]):
            _require_nothing(values.axes[place + k], is_added=bool(call.option("accumulate")))
    unindexed = iter([*range(place), *range(place + len(shape), len(written.axes))])
    made: list[Axis] = []
    for k, axis in enumerate(x.axes):
        # The axis of the values that is written to this one; None where any may be.
        at: int | None = next(unindexed) if k not in axes else None
        if k in own:
            at = place + own[k]
        made.append(_written(axis, values, at))
    return call.result(made, pad_range.finite_of(x.data, values.data))


@rule_for("amp_ir.scatter_add", "relax.scatter_elements")
def scatter(call: PaddedCall) -> PaddedTensor:
    """Write, at each place, to an entry of the same row; from padding only zeros, which are added.

    By the order of an axis padding is written to padding.
    """
    x, ids, source = call.operands
    if not any(one.padded for one in call.operands):
        return call.unpadded()[0]
    along = call.axis()
    kind = str(call.option("reduction")) if "elements" in call.op.name else "add"
    if kind not in ("update", "add"):
        raise Leak("entries are combined at places that are chosen by number")
    aligned([PaddedTensor((one.axes[along],), FINITE, one.dtype) for one in (ids, source)])
    if source.is_padded_on([along]) or ids.is_padded_on([along]):
        require_closed([ids, source])
        if not _is_order(call, 1, along):
            _require_nothing(source.axes[along], is_added=kind == "add")
    _require_inside(call, 1, x, along)
    made = broadcast(
        [_without(one, along) for one in (x, ids, source)],
        lambda a, _ids, b: _sum_or_either(a, b),
        x.dtype,
    )
    axes = list(made.axes)
    axes[along] = _written(x.axes[along], source, None)
    return call.result(axes, pad_range.sum_of(pad_range.finite_of(x.data, source.data)))


def _is_order(call: PaddedCall, position: int, along: int) -> bool:
    """Return whether an operand is the order of an axis: padding is at the places of padding.

    That of data are data, as the rule of sorting has it.
    """
    op = call.maker(call.op.reads[position])
    if op is None or op.name != "relax.argsort":
        return False
    own, ordered = (call.operands[k].axes for k in (0, position))
    is_along = int(op.call.attrs.axis) % len(ordered) == along
    return is_along and [one.kind for one in own[along]] == [one.kind for one in ordered[along]]


def _without(tensor: PaddedTensor, along: int) -> PaddedTensor:
    """Return a tensor as if it had one entry along an axis."""
    return tensor.with_axes([a if k != along else () for k, a in enumerate(tensor.axes)])


def _sum_or_either(a: Range, b: Range) -> Range:
    return ZERO if a.is_zero and b.is_zero else pad_range.finite_of(a, b)


def _place_of(axes: Sequence[int]) -> int:
    """Return where the axes of the indices are: in front, unless they index neighbours."""
    return axes[0] if list(axes) == list(range(axes[0], axes[0] + len(axes))) else 0


def _broadcast_axes(ids: Sequence[PaddedTensor]) -> list[Axis]:
    """Return the axes of indices that are broadcast."""
    rows = aligned(ids)
    return [next((axis for axis in column if axis), ()) for column in zip(*rows, strict=True)]


def _own_places(
    call: PaddedCall, tensor: PaddedTensor, ids: Sequence[PaddedTensor], first: int
) -> dict[int, int]:
    """Return, by padded axis that its own indices choose, the axis of the indices that does.

    `first` is the operand that holds the first indices.

    Raises:
        Leak: others choose entries of a padded axis, and may be beyond its data.
    """
    ndim = max(len(one.axes) for one in ids)
    found: dict[int, int] = {}
    axes = [int(one) for one in call.option("axes")]
    for position, (k, one) in enumerate(zip(axes, ids, strict=True)):
        if not tensor.is_padded_on([k]):
            continue
        own = None if one.index_axis is None else one.axes[one.index_axis]
        if own is None or [f.kind for f in own] != [f.kind for f in tensor.axes[k]]:
            _require_inside(call, first + position, tensor, k)
            continue
        assert one.index_axis is not None
        at = ndim - len(one.axes) + one.index_axis
        if at in found.values():
            raise Leak(f"entries of {_name(tensor.axes[k])} are chosen on a diagonal")
        found[k] = at
    return found


def _require_inside(call: PaddedCall, position: int, tensor: PaddedTensor, along: int) -> None:
    """Require that the operand at a position chooses data, where an axis is padded.

    Raises:
        Leak: it may choose padding.
    """
    if not tensor.is_padded_on([along]):
        return
    require_closed([tensor])
    factor = tensor.axes[along][0]
    is_known = len(tensor.axes[along]) == 1 and factor.dimension is not None
    if not is_known or not call.are_inside(position, Limit(factor.dimension, factor.shift)):  # type: ignore[arg-type]
        raise Leak(
            f"entries of {_name(tensor.axes[along])} are chosen by number, padding among them. "
            "Compute the numbers from the batch alone, as the sum of its mask less 1"
        )


def require_closed(tensors: Sequence[PaddedTensor]) -> None:
    """Require that what is known of padding holds beside padding of other axes too.

    Raises:
        Leak: it may not.
    """
    if any(factor.is_open for one in tensors for factor in one.factors):
        raise Leak("entries are chosen of a tensor that is masked where two axes are padding")


def _require_nothing(axis: Axis, *, is_added: bool) -> None:
    """Require that padding of this axis, which may be written to data, is 0 that is added.

    Raises:
        Leak: it may change data.
    """
    if not is_added or not axis or not all(one.pad.is_zero for one in axis if one.is_padded):
        raise Leak("padding is written to places that are chosen by number")


def _written(axis: Axis, values: PaddedTensor, at: int | None) -> Axis:
    """Return an axis that is written to by the values' axis `at`, or by padding of any (None)."""
    if at is None:
        return tuple(one.with_pad(_joined(one.pad, values.padded)) for one in axis)
    if not values.axes[at]:
        return tuple(one.with_pad(_sum_or_either(one.pad, values.everything)) for one in axis)
    pairs = zip(axis, values.axes[at], strict=True)
    return tuple(one.with_pad(_sum_or_either(one.pad, other.pad)) for one, other in pairs)


def _joined(pad: Range, written: Sequence[Factor]) -> Range:
    for one in written:
        pad = _sum_or_either(pad, one.pad)
    return pad


def _name(axis: Axis) -> str:
    return next(one.name for one in axis if one.is_padded)
