# SPDX-License-Identifier: Apache-2.0
"""Coordinates of a kernel: flat positions and indices from row and column variables."""

from __future__ import annotations

import math
from typing import Any

import attrs
from tvm import tirx

from amp_ir.ir.vector_instructions import LANES
from amp_ir.loops.builders import unflatten
from amp_ir.loops.group import Domain
from amp_ir.loops.ir import Index, Value


@attrs.frozen
class Axis:
    """A loop dimension: neighbouring dimensions of the same kind, merged."""

    dimensions: tuple[int, ...]
    extent: int
    stride: int


def merged_axes(domain: Domain) -> tuple[list[Axis], list[Axis]]:
    """Return the row axes and the column axes of a domain with fixed columns, outer to inner."""
    columns = set(domain.axes or ())
    strides = _strides(domain.shape)
    runs: list[tuple[bool, list[int]]] = []
    for d, n in enumerate(domain.shape):
        if n == 1:
            continue
        is_column = d in columns
        if runs and runs[-1][0] == is_column:
            runs[-1][1].append(d)
        else:
            runs.append((is_column, [d]))
    axes = [
        (
            is_column,
            Axis(tuple(dims), math.prod(domain.shape[d] for d in dims), strides[dims[-1]]),
        )
        for is_column, dims in runs
    ]
    return [a for c, a in axes if not c], [a for c, a in axes if c]


def _strides(shape: tuple[int, ...]) -> list[int]:
    strides, step = [0] * len(shape), 1
    for d in reversed(range(len(shape))):
        strides[d] = step
        step *= shape[d]
    return strides


@attrs.frozen
class Part:
    """A part of a concatenation, and the index of an element in it."""

    value: Value
    index: Index


@attrs.define
class Position:
    """The element that a kernel computes: a row, and a column unless `column` is None.

    `row` and `column` are the positions along the row and column axes, one entry per axis; `lane`
    is the variable of the vector loop, if any.
    """

    domain: Domain
    row_axes: list[Axis]
    column_axes: list[Axis]
    row: list[Any]
    column: list[Any] | None
    lane: Any = None
    _indices: dict[tuple[int, ...], Index] = attrs.field(factory=dict)

    def part_of(self, value: Value) -> Part | None:
        """Return the part of a concatenation that the element is known to be of, if it is."""
        del value
        return None

    def flat(self) -> Any:
        """Return the flat position of the element in a FULL value."""
        assert self.column is not None
        pairs = zip(self.row_axes + self.column_axes, self.row + self.column, strict=True)
        return _sum(variable * axis.stride for axis, variable in pairs)

    def flat_row(self) -> Any:
        """Return the flat position in a ROW value."""
        flat: Any = 0
        for axis, variable in zip(self.row_axes, self.row, strict=True):
            flat = variable if isinstance(flat, int) else flat * axis.extent + variable
        return flat

    def index(self, shape: tuple[int, ...]) -> Index:
        """Return the element's index in a FULL value of `shape`, the same objects each time."""
        known = self._indices.get(shape)
        if known is None:
            known = self._make_index(shape)
            self._indices[shape] = known
        return known

    def row_index(self, shape: tuple[int, ...]) -> Index:
        """Return the index of the row in a ROW value of `shape`."""
        return unflatten(self.flat_row(), shape)

    def _make_index(self, shape: tuple[int, ...]) -> Index:
        assert self.column is not None
        if shape == self.domain.shape:
            return self._index_by_axis()
        if len(self.row_axes) <= 1 and len(self.column_axes) == 1:
            row = self.row[0] if self.row else 0
            return split_index(row, self.column[0], self.column_axes[0].extent, shape, self.lane)
        return unflatten(self.flat(), shape)

    def _index_by_axis(self) -> Index:
        assert self.column is not None
        index: list[Any] = [0] * len(self.domain.shape)
        pairs = zip(self.row_axes + self.column_axes, self.row + self.column, strict=True)
        for axis, variable in pairs:
            extents = tuple(self.domain.shape[d] for d in axis.dimensions)
            own = split_index(0, variable, axis.extent, extents, self.lane)
            for d, i in zip(axis.dimensions, own, strict=True):
                index[d] = i
        return tuple(index)


def split_index(
    row: Any, column: Any, columns: int, shape: tuple[int, ...], lane: Any = None
) -> Index:
    """Return the index in `shape` of flat position `row * columns + column`, with few divisions.

    A dimension inside the row or inside the column depends on that variable alone; a dimension that
    spans both depends on both. A position that whole vectors of columns have in common does not
    depend on the `lane`.
    """
    total = math.prod(shape)
    if not total * columns:
        return (0,) * len(shape)  # of a loop that is never entered
    start = None if lane is None else _start_of_vector(column, lane)
    index: list[Any] = []
    strides = _strides(shape)
    for n, stride in zip(shape, strides, strict=True):
        is_first = stride * n == total
        if n == 1:
            index.append(0)
        elif stride % columns == 0:
            i = _divide(row, stride // columns)
            index.append(i if is_first else _modulo(i, n))
        elif columns % (stride * n) == 0:
            index.append(_inside(column, start, lane, (stride, n, stride * n == columns)))
        elif columns % stride == 0 and (stride * n) % columns == 0:
            i = row if is_first else _modulo(row, stride * n // columns)
            index.append(i * (columns // stride) + _divide(column, stride))
        else:
            return unflatten(row * columns + column, shape)
    return tuple(index)


def _inside(column: Any, start: Any, lane: Any, place: tuple[int, int, bool]) -> Any:
    """Return where a column is along a dimension, of a `place`: its stride, its extent, is_whole.

    `is_whole`: no other dimension of the columns is outside of it. `start` is the column of the
    vector's first lane, or None.
    """
    stride, extent, is_whole = place
    if start is not None and stride % LANES == 0:
        column = start
    elif start is not None and stride == 1 and extent % LANES == 0 and not is_whole:
        return _modulo(start, extent) + lane
    i = _divide(column, stride)
    return i if is_whole else _modulo(i, extent)


def _start_of_vector(column: Any, lane: Any) -> Any | None:
    """Return the column of a vector's first lane, if that is a multiple of LANES; else None."""
    if isinstance(column, int):
        return None
    if column is lane:
        return 0
    terms, waiting = [], [column]
    while waiting:
        term = waiting.pop()
        if isinstance(term, tirx.Add):
            waiting += [term.b, term.a]
        else:
            terms.append(term)
    others = [term for term in terms if not term.same_as(lane)]
    if len(others) != len(terms) - 1 or not all(_is_multiple(term) for term in others):
        return None
    return _sum(others)


def _is_multiple(term: Any) -> bool:
    numbers = [term.a, term.b] if isinstance(term, tirx.Mul) else [term]
    return any(isinstance(one, tirx.IntImm) and int(one) % LANES == 0 for one in numbers)


def _divide(a: Any, b: int) -> Any:
    if b == 1 or isinstance(a, int):
        return a if b == 1 else a // b
    return tirx.floordiv(a, b)


def _modulo(a: Any, b: int) -> Any:
    return a % b if isinstance(a, int) else tirx.floormod(a, b)


def _sum(terms: Any) -> Any:
    total: Any = 0
    for term in terms:
        total = term if isinstance(total, int) and total == 0 else total + term
    return total
