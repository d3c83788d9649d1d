# SPDX-License-Identifier: Apache-2.0
"""Axes of a batch whose lengths differ between calls, found while steps run (`buckets="auto"`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs

from amp_ir.buckets.chosen_sizes import ChosenSizes

Axis = tuple[int, int]  # the position of a tensor among the leaves of the batch, and its axis
Shapes = Sequence[tuple[int, ...] | None]


@attrs.define
class VaryingAxes:
    """The axes of the batches of one structure that are to be padded, with their sizes.

    Axes that are found in one call are one group: they are left out together.
    """

    _first: Shapes
    _limit: int
    _groups: list[Mapping[Axis, ChosenSizes]] = attrs.field(factory=list)
    _left_out: set[Axis] = attrs.field(factory=set)

    def see(self, shapes: Shapes, padded: Collection[int]) -> frozenset[Axis]:
        """Compare a batch's shapes with the first one's; return the axes that are left out for it.

        `padded` are the tensors that have a number to be padded with. An axis is left out where a
        tensor without one has the same length in an axis that varies: it would stay shorter.
        """
        known = self._left_out.union(*self._groups)
        new = [
            (k, axis)
            for k, (shape, first) in enumerate(zip(shapes, self._first, strict=True))
            if shape is not None and first is not None
            for axis in range(len(shape))
            if shape[axis] != first[axis] and (k, axis) not in known
        ]
        if not new:
            return frozenset()
        lengths = {_length(shapes, one) for one in new if one[0] not in padded}
        named = frozenset(one for one in new if one[0] in padded)
        beside = frozenset(one for one in named if _length(shapes, one) in lengths)
        self._left_out.update(beside, (one for one in new if one[0] not in padded))
        # Axes that had one length and have one again are one dimension. The first length is a size,
        # for which there is a program.
        sizes: dict[tuple[int, int], ChosenSizes] = {}
        group = {}
        for one in sorted(named - beside):
            first = _length(self._first, one)
            both = first, _length(shapes, one)
            group[one] = sizes.setdefault(both, ChosenSizes(self._limit, first))
        if group:
            self._groups.append(group)
        return beside

    def sizes(self, position: int) -> dict[int, ChosenSizes]:
        """Return the sizes of the axes of a tensor that are padded."""
        return {
            axis: sizes
            for group in self._groups
            for (k, axis), sizes in group.items()
            if k == position
        }

    def leave_out(self, axes: Collection[Axis]) -> Collection[Axis]:
        """Leave out the group found last that has one of these axes, and return it."""
        group = next(one for one in reversed(self._groups) if not one.keys().isdisjoint(axes))
        self._groups.remove(group)
        self._left_out.update(group)
        return group


def _length(shapes: Shapes, axis: Axis) -> int:
    shape = shapes[axis[0]]
    assert shape is not None
    return shape[axis[1]]
