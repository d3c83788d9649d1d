# SPDX-License-Identifier: Apache-2.0
"""Axes of a padded tensor: which of their entries are data.

The proof looks at a step twice, captured with two sizes of each padded dimension. A `Dimension` is
one of those: n entries of the batch, padded to `size`, or to `other_size` in the second capture. An
axis is a product of factors, the outermost first, as `reshape` merges them. A factor is plain, or
padded: its first n + shift entries are data. The shift is -1, for example, after `x[:, :-1]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs

from amp_ir.padding.pad_range import FINITE, Range

Pair = tuple[int, int]


@attrs.frozen
class Dimension:
    """A padded dimension of the batch, by the sizes that it has in the two captures."""

    name: str
    size: int
    other_size: int


@attrs.frozen
class Factor:
    """A factor of an axis: its size in both captures and, where padded, the dimension.

    `pad` is what is known of the entries beyond the data, whatever the indices of other axes are.
    """

    size: int
    other_size: int
    dimension: Dimension | None = None
    shift: int = 0
    pad: Range = FINITE
    # Of entries that are padding by another axis too, `pad` may not hold: softmax of a row of
    # padding in which all is masked gives each entry the same weight.
    is_open: bool = False
    # What is known of the padding beside data of all other axes, if more than `pad`.
    beside: Range | None = None
    # Padding comes before the data, as between the flips of the gradient of `cumsum`.
    is_reversed: bool = False

    @property
    def is_padded(self) -> bool:
        """Return whether some entries are no data, or may be: the extent follows the length."""
        return self.dimension is not None or self.size != self.other_size

    @property
    def name(self) -> str:
        """Return the name of the dimension."""
        return "an axis that is as long" if self.dimension is None else self.dimension.name

    @property
    def kind(self) -> tuple[int, int, str | None, int, bool]:
        """Return all but what is known of the padding."""
        name = None if self.dimension is None else self.dimension.name
        return self.size, self.other_size, name, self.shift, self.is_reversed

    def with_pad(self, pad: Range) -> Factor:
        """Return the factor with something else known of its padding."""
        return attrs.evolve(self, pad=pad, beside=None) if self.is_padded else self

    def mapped(self, function: Callable[[Range], Range]) -> Factor:
        """Return the factor of a function of each number."""
        beside = None if self.beside is None else function(self.beside)
        return attrs.evolve(self.with_pad(function(self.pad)), beside=beside)


@attrs.frozen
class Limit:
    """Numbers less than n + shift, for the n entries of a dimension that are data."""

    dimension: Dimension
    shift: int

    def moved(self, distance: int) -> Limit:
        """Return the limit of numbers that are larger by a distance."""
        return attrs.evolve(self, shift=self.shift + distance)


Axis = tuple[Factor, ...]


def plain(size: int) -> Axis:
    """Return an axis that is all data."""
    return () if size == 1 else (Factor(size, size),)


def padded(dimension: Dimension, shift: int = 0, pad: Range = FINITE) -> Factor:
    """Return a factor of which the first n + shift entries are data."""
    sizes = dimension.size + shift, dimension.other_size + shift
    return Factor(*sizes, dimension, shift, pad)


def sizes_of(axis: Sequence[Factor]) -> Pair:
    """Return the extents of an axis in both captures."""
    return math.prod(one.size for one in axis), math.prod(one.other_size for one in axis)


def merged(axis: Sequence[Factor]) -> Axis:
    """Return an axis in its one form: neighbouring plain factors are one, those of 1 are none."""
    found: list[Factor] = []
    for one in axis:
        if not one.is_padded and one.size == 1:
            continue
        if found and not one.is_padded and not found[-1].is_padded:
            size = found.pop().size * one.size
            found.append(Factor(size, size))
        else:
            found.append(one)
    return tuple(found)


def axis_of_sizes(sizes: Pair, dimensions: Sequence[Dimension], pad: Range = FINITE) -> Axis | None:
    """Return the axis of a tensor made from sizes alone, as by `arange`; None if it is unclear."""
    if sizes[0] == sizes[1]:
        return plain(sizes[0])
    for one in dimensions:
        if sizes[0] - sizes[1] == one.size - one.other_size:
            return (padded(one, sizes[0] - one.size, pad),)
    return None


def axis_of_one_number(
    sizes: Pair, dimensions: Sequence[Dimension], pad: Range = FINITE
) -> Axis | None:
    """Return an axis of a tensor of one number: its factors are in any order."""
    found = axis_of_sizes(sizes, dimensions, pad)
    if found is not None:
        return found
    for one in dimensions:
        count, rest = divmod(sizes[0] - sizes[1], one.size - one.other_size)
        if rest == 0 and sizes == (count * one.size, count * one.other_size):
            return (Factor(count, count), padded(one, 0, pad))
    return None


def reshaped(axes: Sequence[Axis], sizes: Sequence[Pair]) -> list[Axis] | None:
    """Return the axes after a reshape; None where it cuts through a padded factor."""
    waiting = list(merged([one for axis in axes for one in axis]))
    found = []
    for pair in sizes:
        axis = _taken(waiting, pair)
        if axis is None:
            return None
        found.append(merged(axis))
    return None if waiting else found


def _taken(waiting: list[Factor], sizes: Pair) -> list[Factor] | None:
    """Take the factors of an axis of these sizes from the front of a list."""
    axis = []
    size, other_size = sizes
    while (size, other_size) != (1, 1):
        if not waiting:
            return None
        one = waiting.pop(0)
        if size % one.size == 0 and other_size % one.other_size == 0:
            axis.append(one)
            size, other_size = size // one.size, other_size // one.other_size
            continue
        if one.is_padded:
            return None
        # A plain factor is cut: the outer part is of this axis.
        part = math.gcd(one.size, size, other_size)
        if part == 1:
            return None
        axis.append(Factor(part, part))
        waiting.insert(0, Factor(one.size // part, one.size // part))
        size, other_size = size // part, other_size // part
    return axis
