# SPDX-License-Identifier: Apache-2.0
"""Padding rules of ops that move elements, and of those that make tensors from sizes."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from amp_ir.padding import pad_range
from amp_ir.padding.axes import (
    Axis,
    Factor,
    Pair,
    axis_of_one_number,
    axis_of_sizes,
    padded,
    plain,
    reshaped,
    sizes_of,
)
from amp_ir.padding.limits import holds_places, limit_of_places
from amp_ir.padding.pad_range import ZERO, Range
from amp_ir.padding.padded_call import (
    Leak,
    PaddedCall,
    PaddedTensor,
    require_outermost,
    rule_for,
)


@rule_for("relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.flatten")
def reshape(call: PaddedCall) -> PaddedTensor:
    """Group the factors of axes anew."""
    (source,) = call.operands
    axes = reshaped(source.axes, call.result_sizes[0])
    if axes is None and source.is_uniform:
        return _of_one_number(call, source.data)
    if axes is None:
        raise Leak("the reshape mixes padding with data")
    return source.with_axes(axes, index_axis=_moved_index(source, axes))


def _moved_index(source: PaddedTensor, axes: list[Axis]) -> int | None:
    """Return the axis whose indices the entries are after a reshape."""
    if source.index_axis is None:
        return None
    own = source.axes[source.index_axis]
    # An axis of the same entries, each as far from the next one.
    stride = _count(source.axes[source.index_axis + 1 :])
    return next(
        (
            k
            for k, axis in enumerate(axes)
            if own and axis == own and _count(axes[k + 1 :]) == stride
        ),
        None,
    )


def _count(axes: Sequence[Axis]) -> Pair:
    """Return the number of entries in both captures."""
    return sizes_of([factor for axis in axes for factor in axis])


@rule_for("relax.permute_dims")
def permute(call: PaddedCall) -> PaddedTensor:
    """Move axes."""
    (source,) = call.operands
    given = call.option("axes")
    count = len(source.axes)
    order = [int(one) % count for one in given] if given is not None else [*range(count)][::-1]
    index = None if source.index_axis is None else order.index(source.index_axis)
    return source.with_axes([source.axes[k] for k in order], index_axis=index)


@rule_for("relax.broadcast_to")
def broadcast_to(call: PaddedCall) -> PaddedTensor:
    """Repeat data; repetitions beyond the data are padding that equals data."""
    (source,) = call.operands
    sizes = call.result_sizes[0]
    if not any(source.axes):
        return _of_one_number(call, source.data)
    missing = len(sizes) - len(source.axes)
    axes: list[Axis] = []
    for k, pair in enumerate(sizes):
        own = source.axes[k - missing] if k >= missing else ()
        found = own or axis_of_sizes(pair, call.dimensions, source.everything)
        if found is None:
            raise Leak(f"the extent of axis {k} follows the padded length in an unknown way")
        axes.append(found)
    index = None if source.index_axis is None else source.index_axis + missing
    return source.with_axes(axes, index_axis=index)


@rule_for("relax.full", "relax.zeros", "relax.ones")
def full(call: PaddedCall) -> PaddedTensor:
    """Make a tensor of one number."""
    filler = call.operands[0].data if call.operands else None
    if filler is None:
        filler = ZERO if call.op.name == "relax.zeros" else pad_range.constant(1.0)
    return _of_one_number(call, filler)


def _of_one_number(call: PaddedCall, number: Range) -> PaddedTensor:
    """Return a tensor all of whose entries are one number, known or not."""
    axes: list[Axis] = []
    for sizes in call.result_sizes[0]:
        axis = axis_of_one_number(sizes, call.dimensions, number)
        axes.append((Factor(*sizes, pad=number),) if axis is None else axis)
    return PaddedTensor(tuple(axes), number, call.result_dtypes[0], is_uniform=True)


@rule_for("relax.arange")
def arange(call: PaddedCall) -> PaddedTensor:
    """Count: before an entry at padding are those of the data, of which there is at least 1."""
    numbers = [(call.numbers(k)[0][0], call.numbers(k)[1][0]) for k in range(3)]
    (start, other_start), _, (step, other_step) = numbers
    if (start, step) != (other_start, other_step):
        raise Leak("the numbers that are counted begin or advance with the padded length")
    (axis,) = call.made()
    for one in axis:
        if one.dimension is not None:
            call.require_size(one.dimension, 1 - one.shift)
    counted = (start, step) == (0, 1) and holds_places(call.result_dtypes[0], axis)
    second = float(start + step)
    pad = Range(second) if step > 0 else Range(high=second)
    axes = (tuple(one.with_pad(pad) for one in axis),)
    data = Range(float(start)) if step > 0 else Range(high=float(start))
    if not counted:
        return PaddedTensor(axes, data, call.result_dtypes[0])
    limit = limit_of_places(axis[0]) if axis else None
    return PaddedTensor(axes, data, call.result_dtypes[0], index_axis=0, limit=limit)


@rule_for("relax.tril", "relax.triu")
def triangle(call: PaddedCall) -> PaddedTensor:
    """Set elements to 0."""
    call.option("k")
    count = len(call.operands[0].axes)
    require_outermost(
        call.operands[0], [count - 2, count - 1], "elements are chosen by the place on"
    )
    return (
        call.operands[0]
        .pads_mapped(lambda a: a.join(ZERO))
        .with_axes(
            [
                tuple(one.with_pad(one.pad.join(ZERO)) for one in axis)
                for axis in call.operands[0].axes
            ],
            is_uniform=False,
        )
    )


@rule_for("relax.flip")
def flip(call: PaddedCall) -> PaddedTensor:
    """Reverse an axis; where it is padded, padding comes first until it is reversed again."""
    (source,) = call.operands
    along = call.axis()
    axes = list(source.axes)
    if source.is_padded_on([along]):
        (factor,) = axes[along] if len(axes[along]) == 1 else (None,)
        if factor is None or factor.is_open:
            raise Leak(f"the order of {_name(source, along)} is reversed, padding among it")
        axes[along] = (attrs.evolve(factor, is_reversed=not factor.is_reversed),)
    return source.with_axes(axes)


@rule_for("relax.strided_slice")
def strided_slice(call: PaddedCall) -> PaddedTensor:
    """Take a part of axes: one that begins and ends as far from the first entry, or from the last
    one of the data.
    """
    source = call.operands[0]
    axes = list(source.axes)
    lists = [call.numbers(position) for position in (1, 2, 3)]
    strides = call.numbers(4) if len(call.op.args) > 4 else ([1] * len(lists[0][0]),) * 2
    taken = [*lists, strides]
    for k, axis in enumerate(lists[0][0]):
        axis %= len(axes)
        begin, end, stride = ((one[0][k], one[1][k]) for one in taken[1:])
        axes[axis] = _sliced(call, source, axis, begin, end, stride)
    return source.with_axes(axes, is_uniform=source.is_uniform)


def _sliced(
    call: PaddedCall,
    source: PaddedTensor,
    axis: int,
    begin: tuple[int, int],
    end: tuple[int, int],
    stride: tuple[int, int],
) -> Axis:
    """Return an axis of which a part is taken; each number as in both captures."""
    sizes = call.result_sizes[0][axis]
    factors = source.axes[axis]
    if not any(one.is_padded for one in factors):
        return _part_of_data(call, source, begin, sizes)
    (factor,) = factors if len(factors) == 1 else (None,)
    if stride != (1, 1):
        raise Leak(f"every {stride[0]}th entry of {_name(source, axis)} is taken")
    if sizes == sizes_of(factors):
        return factors
    if factor is None or factor.dimension is None:
        raise Leak("a part is taken of an axis that padding is merged into")
    name = factor.dimension.name
    first = [
        one % size if one < 0 else one for one, size in zip(begin, _sizes(factor), strict=True)
    ]
    if first[0] != first[1]:
        raise Leak(f"entries are counted from the end of {name}, where padding is")
    if sizes[0] == sizes[1]:
        call.require_size(factor.dimension, first[0] + sizes[0] - factor.shift)
        return plain(sizes[0])
    shift = sizes[0] - factor.dimension.size
    if shift != sizes[1] - factor.dimension.other_size or shift + first[0] > factor.shift:
        raise Leak(f"the part that is taken of {name} depends on its length in an unknown way")
    call.require_size(factor.dimension, 1 - shift)
    # The part may end before the data, whose last entries are then beyond its own data.
    pad = factor.pad if shift + first[0] == factor.shift else factor.pad.join(source.data)
    return (attrs.evolve(padded(factor.dimension, shift, pad), is_open=factor.is_open),)


def _sizes(factor: Factor) -> tuple[int, int]:
    return factor.size, factor.other_size


def _part_of_data(
    call: PaddedCall, source: PaddedTensor, begin: tuple[int, int], sizes: tuple[int, int]
) -> Axis:
    """Return an axis that is as long as the batch is: the first entries of a table."""
    if begin[0] != begin[1]:
        raise Leak("where the part of a tensor begins depends on the padded length")
    found = axis_of_sizes(sizes, call.dimensions, source.everything)
    if found is None:
        raise Leak("the size of a part follows the padded length in an unknown way")
    return found


def _name(tensor: PaddedTensor, axis: int) -> str:
    names = [one.dimension.name for one in tensor.axes[axis] if one.dimension is not None]
    return names[0] if names else f"axis {axis}"
