# SPDX-License-Identifier: Apache-2.0
"""A group: the values that one kernel computes, and the loops that it computes them in.

A group is one kernel: a row loop, and inside of it loops over the columns of the row. A domain says
which dimensions are rows and which are columns. Members are FULL (one element per row and column),
ROW (one per row: what a reduction over the columns leaves, and arithmetic on that) or COLUMN (one
per column: what a reduction over the rows leaves; known when the kernel ends).
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Literal

import attrs

from amp_ir.loops.ir import Constant, Pointwise, Read, Value


@attrs.frozen
class Domain:
    """The loops of a kernel over an index space of `shape`.

    `axes` are the column dimensions, or None while no reduction has fixed them. `size` is the
    number of elements.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...] | None

    @property
    def size(self) -> int:
        """Number of elements of a FULL value."""
        return math.prod(self.shape)

    @property
    def columns(self) -> int:
        """Return the number of elements in a row."""
        return math.prod(self.shape[axis] for axis in self.axes or ())

    @property
    def rows(self) -> int:
        """Return the number of rows; of rows without elements, too."""
        columns = self.axes or ()
        return math.prod(n for d, n in enumerate(self.shape) if d not in columns)

    @property
    def is_trailing(self) -> bool:
        """Return whether the columns are the last dimensions, so that a row is contiguous."""
        if self.axes is None:
            return True
        significant = [d for d, n in enumerate(self.shape) if n > 1]
        columns = [d for d in significant if d in self.axes]
        return columns == significant[len(significant) - len(columns) :]

    @property
    def keeps_innermost(self) -> bool:
        """Return whether the reduction is over outer dimensions: a result per column of memory."""
        if self.axes is None:
            return False
        significant = [d for d, n in enumerate(self.shape) if n > 1]
        return bool(significant) and significant[-1] not in self.axes


@attrs.define(eq=False)
class Group:
    """The values that one kernel computes; `read_ids` are the ids of all that its members read."""

    number: int
    domain: Domain
    full: list[Value] = attrs.field(factory=list)
    row: list[Value] = attrs.field(factory=list)
    column: list[Value] = attrs.field(factory=list)
    inputs: dict[int, Value] = attrs.field(factory=dict)
    stored: list[Value] = attrs.field(factory=list)
    read_ids: set[int] = attrs.field(factory=set)

    @property
    def members(self) -> list[Value]:
        """All values of the group."""
        return self.full + self.row + self.column

    @cached_property
    def stored_and_read(self) -> frozenset[int]:
        """The ids of values that the kernel stores and that its own members read, too."""
        cache: dict[int, list[Read]] = {}
        read = {
            id(storage_of(one.value))
            for member in self.members
            for one in effective_reads(member, cache)
        }
        return frozenset(read.intersection(id(storage_of(value)) for value in self.stored))

    @property
    def ordered_inputs(self) -> tuple[Value, ...]:
        """Return what the kernel reads from memory, in the order of its parameters."""
        return tuple(sorted(self.inputs.values(), key=lambda value: value.serial))


Placement = Literal["full", "row", "column"]


def storage_of(value: Value) -> Value:
    """Return the value whose memory `value` uses: a reshape has none of its own."""
    while isinstance(value, Pointwise) and value.is_reshape:
        value = value.reads[0].value
    return value


def is_inlined(value: Value) -> bool:
    """Return whether every reader recomputes `value`: views and values that read nothing."""
    if isinstance(value, Constant):
        return True
    return isinstance(value, Pointwise) and (value.is_view or not value.reads)


def effective_reads(value: Value, cache: dict[int, list[Read]]) -> list[Read]:
    """Return what `value` reads, looking through inlined values."""
    known = cache.get(id(value))
    if known is not None:
        return known
    reads: dict[int, Read] = {}
    for read in value.reads:
        inner = [read]
        if is_inlined(read.value):
            inner = [
                Read(r.value, _compose(read.place, r.place), read.is_scattered or r.is_scattered)
                for r in effective_reads(read.value, cache)
            ]
        for r in inner:
            known_read = reads.get(id(r.value))
            if known_read is None:
                reads[id(r.value)] = r
            else:
                place = r.place if r.place == known_read.place else "other"
                is_scattered = r.is_scattered or known_read.is_scattered
                reads[id(r.value)] = Read(r.value, place, is_scattered)
    cache[id(value)] = list(reads.values())
    return cache[id(value)]


def _compose(
    outer: Literal["same", "broadcast", "flat", "other"],
    inner: Literal["same", "broadcast", "flat", "other"],
) -> Literal["same", "broadcast", "flat", "other"]:
    if outer == "same":
        return inner
    if inner == "same":
        return outer
    return "flat" if outer == inner == "flat" else "other"
