# SPDX-License-Identifier: Apache-2.0
"""One call of a padded step, as the rules of the padding proof see it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import attrs

from amp_ir.dialect.registry import DECLARATIONS, options_of
from amp_ir.ir.step_graph import Op, Tree
from amp_ir.padding import pad_range
from amp_ir.padding.axes import Axis, Dimension, Factor, Limit, Pair, axis_of_sizes, plain
from amp_ir.padding.pad_range import FINITE, Range, joined, of_dtype


class Leak(Exception):
    """Padding reaches data in a call; `str(error)` says how."""


@attrs.frozen
class PaddedTensor:
    """A tensor of the padded step; its data equal the tensor of the step without padding.

    `data` is what is known of the data; `is_uniform`: all entries, padding too, are one number.
    `index_axis`: each entry is its own index on this axis. `limit`: what data are less than.
    """

    axes: tuple[Axis, ...]
    data: Range
    dtype: str
    is_uniform: bool = False
    index_axis: int | None = None
    limit: Limit | None = None

    @property
    def factors(self) -> Iterator[Factor]:
        """The factors of all axes."""
        return (one for axis in self.axes for one in axis)

    @property
    def padded(self) -> list[Factor]:
        """The padded factors of all axes."""
        return [one for one in self.factors if one.is_padded]

    @property
    def everything(self) -> Range:
        """What is known of all entries."""
        return joined([self.data, *(one.pad for one in self.padded)])

    def is_padded_on(self, axes: Sequence[int]) -> bool:
        """Return whether some entries on these axes are padding."""
        return any(one.is_padded for axis in axes for one in self.axes[axis])

    def with_axes(self, axes: Sequence[Axis], **changes: Any) -> PaddedTensor:
        """Return the tensor with other axes."""
        return attrs.evolve(self, axes=tuple(axes), **{"index_axis": None, **changes})

    def with_sole_padding_closed(self) -> PaddedTensor:
        """Return the tensor; no entry is padding by another axis where one factor is padded."""
        if len(self.padded) != 1 or not self.padded[0].is_open:
            return self
        axes = [tuple(attrs.evolve(one, is_open=False) for one in axis) for axis in self.axes]
        return attrs.evolve(self, axes=tuple(axes))

    def pads_mapped(self, function: Callable[[Range], Range], dtype: str = "") -> PaddedTensor:
        """Return the result of a function of each number."""
        axes = tuple(tuple(one.mapped(function) for one in axis) for axis in self.axes)
        return PaddedTensor(axes, function(self.data), dtype or self.dtype, self.is_uniform)

    def is_inside(self, limit: Limit, least: int | None) -> bool:
        """Return whether data are known to be in [least, limit)."""
        own = self.limit
        if own is None or own.dimension != limit.dimension or own.shift > limit.shift:
            return False
        return least is None or self.data.low >= least

    def known_as(self, function: Callable[[Range], Range]) -> PaddedTensor:
        """Return the tensor with more known of its numbers: `function` takes what is known."""
        axes = [tuple(one.with_pad(function(one.pad)) for one in axis) for axis in self.axes]
        return attrs.evolve(self, axes=tuple(axes), data=function(self.data))


@attrs.frozen(eq=False)
class PaddedCall:
    """A call in both captures, its operands, and the sizes of its results."""

    op: Op
    other: Op
    operands: Sequence[PaddedTensor]
    result_sizes: Sequence[Sequence[Pair]]
    result_dtypes: Sequence[str]
    dimensions: Sequence[Dimension]
    require_size: Callable[[Dimension, int], None]
    # (tensor, limit, least): whether its data can be required to be in [least, limit).
    require_numbers: Callable[[int, Limit, int | None], bool]
    # The op that makes a tensor, None for an input; what is known of it; its shape.
    maker: Callable[[int], Op | None]
    tensor: Callable[[int], PaddedTensor | None]
    shape: Callable[[int], tuple[int, ...]]

    def are_inside(self, position: int, limit: Limit, least: int | None = 0) -> bool:
        """Return whether the data of an operand are in [least, limit).

        What is not proven is required of each batch, where the batch alone says what they are.
        """
        if self.operands[position].is_inside(limit, least):
            return True
        return self.require_numbers(self.op.reads[position], limit, least)

    def option(self, name: str) -> Any:
        """Return an option of the call, which must be the same in both captures."""
        found = _option(self.op, name), _option(self.other, name)
        if str(found[0]) != str(found[1]):
            raise Leak(f"{name} depends on the padded length ({found[0]}, or {found[1]})")
        return found[0]

    def check_options(self) -> None:
        """Check that the options, and arguments that are numbers, do not follow the length.

        Raises:
            Leak: one does, and is no shape.
        """
        if self.op.name in _OF_LENGTHS:
            return
        if self.op.name in DECLARATIONS:
            for name in options_of(self.op.call).keys() - _SHAPES:
                self.option(name)
        elif str(self.op.call.attrs) != str(self.other.call.attrs):
            raise Leak("an option of it depends on the padded length")
        if self.op.name not in _OF_SIZES and _plain(self.op) != _plain(self.other):
            raise Leak("a number that it takes depends on the padded length")

    def numbers(self, position: int) -> tuple[list[int], list[int]]:
        """Return an argument that is a list of numbers, as in both captures."""
        return _numbers(self.op.args[position]), _numbers(self.other.args[position])

    def axis(self, name: str = "axis", ndim: int | None = None) -> int:
        """Return an option that is an axis, counted from the front."""
        count = len(self.operands[0].axes) if ndim is None else ndim
        return int(self.option(name)) % count

    def result(self, axes: Sequence[Axis], data: Range = FINITE, position: int = 0) -> PaddedTensor:
        """Return a result."""
        return PaddedTensor(tuple(axes), data, self.result_dtypes[position])

    def made(self, position: int = 0) -> list[Axis]:
        """Return the axes of a result that depends on sizes alone."""
        found = []
        for k, sizes in enumerate(self.result_sizes[position]):
            axis = axis_of_sizes(sizes, self.dimensions)
            if axis is None:
                raise Leak(f"the extent of axis {k} follows the padded length in an unknown way")
            found.append(axis)
        return found

    def unpadded(self) -> list[PaddedTensor]:
        """Return results that have no padded axis.

        Raises:
            Leak: one has.
        """
        for sizes in self.result_sizes:
            if any(one != other for one, other in sizes):
                raise Leak("the result has a padded axis, and this op has no rule for that")
        return [
            PaddedTensor(tuple(plain(size) for size, _ in sizes), of_dtype(dtype), dtype)
            for sizes, dtype in zip(self.result_sizes, self.result_dtypes, strict=True)
        ]


Rule = Callable[[PaddedCall], "PaddedTensor | list[PaddedTensor]"]
AnyRule = TypeVar("AnyRule", bound=Rule)
RULES: dict[str, Rule] = {}


def rule_for(*names: str) -> Callable[[AnyRule], AnyRule]:
    """Register the rule of some ops; raise ValueError where one has a rule already."""

    def register(rule: AnyRule) -> AnyRule:
        for name in names:
            if name in RULES:
                raise ValueError(f"{name} has two padding rules")
            RULES[name] = rule
        return rule

    return register


def require_zero(tensor: PaddedTensor, axes: Sequence[int], what: str) -> None:
    """Require that the padding on these axes is 0.

    Raises:
        Leak: it may be something else; `what` says what is done with it.
    """
    for axis in axes:
        for one in tensor.axes[axis]:
            if one.is_padded and not one.pad.is_zero:
                raise Leak(f"{what} over {one.name}, where padding is not 0")


def require_data(tensor: PaddedTensor, axes: Sequence[int], what: str) -> None:
    """Require axes without padding.

    Raises:
        Leak: there is some; `what` says what is done with it.
    """
    for axis in axes:
        for one in tensor.axes[axis]:
            if one.is_padded:
                raise Leak(f"{what} {one.name}, padding included")


def require_outermost(tensor: PaddedTensor, axes: Sequence[int], what: str) -> None:
    """Require that padding on these axes comes after all data, not between rows of them.

    Raises:
        Leak: it may not; `what` says what is done with the order.
    """
    for axis in axes:
        for one in tensor.axes[axis][1:]:
            if one.is_padded:
                raise Leak(f"{what} an axis into which {one.name} is merged, padding between data")


def aligned(tensors: Sequence[PaddedTensor]) -> list[list[Axis | None]]:
    """Return the axes of tensors that are broadcast together; None where one has extent 1.

    Raises:
        Leak: an axis is padded in one tensor and otherwise in another.
    """
    ndim = max((len(one.axes) for one in tensors), default=0)
    rows: list[list[Axis | None]] = []
    for one in tensors:
        missing: list[Axis | None] = [None] * (ndim - len(one.axes))
        rows.append(missing + [axis or None for axis in one.axes])
    for column in zip(*rows, strict=True):
        present = [
            axis
            for axis, tensor in zip(column, tensors, strict=True)
            if axis is not None and not tensor.is_uniform
        ]
        kinds = {tuple(factor.kind for factor in axis) for axis in present}
        if len(kinds) > 1:
            raise Leak(f"{_differ(present)} meet")
    return rows


def _differ(axes: Sequence[Axis]) -> str:
    texts = dict.fromkeys(
        " x ".join(
            str(one.size)
            if one.dimension is None
            else one.dimension.name + (f" {one.shift:+}" if one.shift else "")
            for one in axis
        )
        for axis in axes
    )
    return "axes of different lengths without padding (" + " and ".join(texts) + ")"


def broadcast(
    tensors: Sequence[PaddedTensor], function: Callable[..., Range], dtype: str
) -> PaddedTensor:
    """Return the result of a function of one number of each tensor.

    Raises:
        Leak: the tensors are padded differently.
    """
    rows = aligned(tensors)
    axes = []
    for position in range(len(rows[0])):
        column = [row[position] for row in rows]
        # Where only tensors of one number have the axis, any of them has its factors.
        given = [
            (tensor.is_uniform, axis)
            for axis, tensor in zip(column, tensors, strict=True)
            if axis is not None
        ]
        chosen = min(given, key=lambda one: one[0], default=(True, ()))[1]
        axes.append(
            tuple(
                attrs.evolve(
                    factor.with_pad(_pad_of(tensors, column, k, function, dtype)),
                    is_open=any(axis[k].is_open for _, axis in given if len(axis) > k),
                    beside=_beside_of(tensors, column, k, function, dtype),
                )
                for k, factor in enumerate(chosen)
            )
        )
    if sum(factor.is_open for axis in axes for factor in axis) > 1:
        raise Leak("tensors that are masked along different padded axes meet")
    data = pad_range.stored(function(*(one.data for one in tensors)), dtype)
    is_uniform = (
        all(one.is_uniform or not one.axes for one in tensors) and data.constant is not None
    )
    return PaddedTensor(tuple(axes), data, dtype, is_uniform)


def _pad_of(
    tensors: Sequence[PaddedTensor],
    column: Sequence[Axis | None],
    k: int,
    function: Callable[..., Range],
    dtype: str,
) -> Range:
    parts = list(_parts(tensors, column, k))
    found = joined(pad_range.stored(function(*pads), dtype) for pads in itertools.product(*parts))
    pads = [joined(one) for one in parts]
    # What hides by an operand without the axis hides as it does in data.
    own = [
        pad
        for pad, tensor, axis in zip(pads, tensors, column, strict=True)
        if axis is not None and not tensor.is_uniform
    ]
    is_masked = any(pad.may_mask for pad in own)
    if function is pad_range.choose and pads[0] in own:
        is_masked |= any(pad.may_mask for pad in pads[1:]) and pads[0].constant != 0.0
    return attrs.evolve(found, is_masked=is_masked and found.low <= pad_range.HIDDEN)


def _beside_of(
    tensors: Sequence[PaddedTensor],
    column: Sequence[Axis | None],
    k: int,
    function: Callable[..., Range],
    dtype: str,
) -> Range | None:
    """Return what is known of the padding of the k-th factor beside data of other axes."""
    own = [
        None if axis is None or tensor.is_uniform else axis[k]
        for tensor, axis in zip(tensors, column, strict=True)
    ]
    if not any(one is not None and one.beside is not None for one in own):
        return None
    parts = (
        tensor.data if one is None else one.beside or one.pad
        for tensor, one in zip(tensors, own, strict=True)
    )
    return pad_range.stored(function(*parts), dtype)


def _parts(
    tensors: Sequence[PaddedTensor], column: Sequence[Axis | None], k: int
) -> Iterator[Sequence[Range]]:
    """Yield what each tensor has at the padding of the k-th factor.

    One that lacks the axis has data there or, where other axes are padding too, its own padding.
    """
    for tensor, axis in zip(tensors, column, strict=True):
        if tensor.is_uniform:
            yield [tensor.data]
        elif axis is None:
            yield list(dict.fromkeys([tensor.data, *(one.pad for one in tensor.padded)]))
        else:
            yield [axis[k].pad]


# Options that say a shape, which follows the padded length as the result does.
_SHAPES = {"shape", "input_shape", "output_shape", "results"}
# Ops whose arguments are sizes or places, at which their rules look.
_OF_SIZES = {
    f"relax.{name}" for name in "reshape broadcast_to full zeros ones arange strided_slice".split()
}
# An op whose options are limits of lengths, at which its rule looks.
_OF_LENGTHS = {"amp_ir.checked_lengths"}


def _plain(op: Op) -> list[str]:
    """Return the arguments that are no tensors, as text."""
    return [str(one) for one in op.args if not isinstance(one, (int, tuple))]


def _option(op: Op, name: str) -> Any:
    if op.name in DECLARATIONS:
        return options_of(op.call).get(name)
    return getattr(op.call.attrs, name, None)


def _numbers(tree: Tree) -> list[int]:
    """Return the numbers of an argument: one, or a tuple of them."""
    fields: Sequence[Any] = tree if isinstance(tree, tuple) else [tree]
    return [int(one.value) for one in fields]
