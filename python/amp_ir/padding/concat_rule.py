# SPDX-License-Identifier: Apache-2.0
"""Padding rule of concatenation."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from amp_ir.padding.axes import Axis, Factor, merged, padded, plain
from amp_ir.padding.pad_range import joined
from amp_ir.padding.padded_call import Leak, PaddedCall, PaddedTensor, broadcast, rule_for


@rule_for("relax.concat")
def concat(call: PaddedCall) -> PaddedTensor:
    """Join tensors; what comes after padded entries must equal their padding."""
    tensors = call.operands
    along = call.axis()
    others = [
        one.with_axes([a if k != along else () for k, a in enumerate(one.axes)]) for one in tensors
    ]
    whole = broadcast(others, lambda *ranges: joined(ranges), call.result_dtypes[0])
    axes = list(whole.axes)
    axes[along] = _concatenated(call, along)
    return PaddedTensor(tuple(axes), whole.data, whole.dtype)


def _concatenated(call: PaddedCall, along: int) -> Axis:
    sizes = call.result_sizes[0][along]
    kinds = {tuple(factor.kind for factor in one.axes[along]) for one in call.operands}
    if len(kinds) == 1 and call.operands[0].is_padded_on([along]):
        return _repeated([one.axes[along] for one in call.operands])
    position = _padded_operand(call, along)
    if position is None:
        if sizes[0] != sizes[1]:
            raise Leak("the number of entries that are joined depends on the padded length")
        return plain(sizes[0])
    factors = call.operands[position].axes[along]
    if len(factors) != 1 or factors[0].dimension is None:
        raise Leak("entries are joined along an axis that padding is merged into")
    factor, dimension = factors[0], factors[0].dimension
    for one in call.operands[position + 1 :]:
        if one.everything.constant is None or one.everything.constant != factor.pad.constant:
            raise Leak(f"entries follow the padding of {dimension.name}, and differ from it")
    if any(_is_filler(one, along) for one in call.operands[:position]):
        raise Leak(f"what is in front of {dimension.name} depends on its length")
    if sizes[0] == sizes[1]:
        return plain(sizes[0])  # filled up to a fixed size with what the padding is
    shift = sizes[0] - dimension.size
    if shift != sizes[1] - dimension.other_size:
        raise Leak(f"how many entries are joined with {dimension.name} depends on its length")
    return (attrs.evolve(padded(dimension, shift, factor.pad), is_open=factor.is_open),)


def _repeated(axes: Sequence[Axis]) -> Axis:
    """Return the axis of tensors of one length, as `stack` and then `flatten` put them."""
    if any(one.dimension is None and one.is_padded for axis in axes for one in axis):
        raise Leak("how many entries are joined depends on the padded length in an unknown way")
    columns = zip(*axes, strict=True)
    whole = [
        attrs.evolve(
            column[0].with_pad(joined(one.pad for one in column)),
            is_open=any(one.is_open for one in column),
        )
        for column in columns
    ]
    return merged([Factor(len(axes), len(axes)), *whole])


def _padded_operand(call: PaddedCall, along: int) -> int | None:
    """Return the position of the operand that is padded, other than a filler; None for none."""
    found = [k for k, one in enumerate(call.operands) if one.is_padded_on([along])]
    others = [k for k in found if not _is_filler(call.operands[k], along)]
    if len(others) > 1:
        raise Leak("entries follow padding: two padded tensors are joined")
    if found and not others:
        raise Leak("how many entries are joined depends on the padded length in an unknown way")
    return others[0] if others else None


def _is_filler(tensor: PaddedTensor, along: int) -> bool:
    """Return whether all are one number, as many as the length leaves of a fixed size."""
    factors = tensor.axes[along]
    is_unknown = len(factors) == 1 and factors[0].is_padded and factors[0].dimension is None
    return is_unknown and tensor.is_uniform
