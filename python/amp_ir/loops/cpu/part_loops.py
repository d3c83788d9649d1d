# SPDX-License-Identifier: Apache-2.0
"""CPU kernels that compute with a concatenation: loops over each of its parts.

Loops over the elements of the result would read every part for each element, and select.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
from tvm import tirx
from tvm.tirx import For, ForKind

from amp_ir.ir.row_loops import ROW
from amp_ir.ir.vector_instructions import LANES
from amp_ir.loops.builders import flatten, unflatten
from amp_ir.loops.codegen.coordinates import Axis, Part, Position
from amp_ir.loops.codegen.kernel import unflatten_axes
from amp_ir.loops.codegen.kernel_buffers import FlatBuffer
from amp_ir.loops.codegen.statements import sequence
from amp_ir.loops.cpu.group_loops import GRAIN, GroupLoops
from amp_ir.loops.group import Domain, Group
from amp_ir.loops.ir import Index, Pointwise, Value

# Parts up to which each gets loops of its own: LLVM takes 10 ms and more for one.
MOST_PARTS = 16
# Columns of a single long row that a thread takes at a time.
CHUNK = 4096


def split_concatenation(group: Group) -> Pointwise | None:
    """Return the concatenation of a group without reductions whose parts get their own loops."""
    if group.domain.axes is not None:
        return None
    values = (value for value in group.full if isinstance(value, Pointwise))
    return next((value for value in values if value.parts and _pays_off(value)), None)


def _pays_off(value: Pointwise) -> bool:
    """Return whether loops over the parts take fewer steps: a vector is one, or a single element.

    Over the result, each vector is computed from all of the parts.
    """
    parts = value.parts
    if not 2 <= len(parts) <= MOST_PARTS or any(part.size == 0 for part in parts):
        return False
    is_last = value.part_axis == len(value.shape) - 1
    columns = [part.shape[-1] for part in (parts if is_last else parts[:1])]
    steps = sum(n // LANES + n % LANES for n in columns)
    return steps <= -(-value.shape[-1] // LANES) * len(parts)


@attrs.define
class _PartPosition(Position):
    """An element of `value` by its position in the part that begins at `start` of its axis."""

    value: Pointwise = attrs.field(kw_only=True)
    part: Value = attrs.field(kw_only=True)
    start: int = attrs.field(kw_only=True)

    def part_of(self, value: Value) -> Part | None:
        return Part(self.part, self._in_part()) if value is self.value else None

    def flat(self) -> Any:
        return flatten(self.index(self.value.shape), self.value.shape)

    def _make_index(self, shape: tuple[int, ...]) -> Index:
        if shape != self.value.shape:
            return unflatten(self.flat(), shape)
        axis = self.value.part_axis
        return tuple(
            i + self.start if d == axis and self.start else i for d, i in enumerate(self._in_part())
        )

    def _in_part(self) -> Index:
        assert self.column is not None
        index: list[Any] = [0] * len(self.part.shape)
        pairs = zip(self.row_axes + self.column_axes, self.row + self.column, strict=True)
        for axis, variable in pairs:
            extents = [self.part.shape[d] for d in axis.dimensions]
            for d, i in zip(axis.dimensions, unflatten(variable, extents), strict=True):
                index[d] = i
        return tuple(index)


@attrs.define
class _PartLoops(GroupLoops):
    """The loops of a group over one part of `value`: `domain` is that of the part."""

    value: Pointwise = attrs.field(kw_only=True)
    part: Value = attrs.field(kw_only=True)
    start: int = attrs.field(kw_only=True)

    @property
    def rows(self) -> int:
        """The number of rows of the part."""
        return math.prod(axis.extent for axis in self.row_axes)

    def position(self, axes: list[Axis], row: list[Any], column: list[Any] | None) -> Position:
        whole = Domain(self.value.shape, (len(self.value.shape) - 1,))
        return _PartPosition(
            whole, self.row_axes, axes, row, column,
            value=self.value, part=self.part, start=self.start,
        )  # fmt: skip


def parts_kernel(
    group: Group, buffers: dict[int, FlatBuffer], value: Pointwise, *, strict: bool
) -> tirx.Stmt:
    """Emit loops over the elements of each part; one over rows where all have the same rows."""
    parts, start = [], 0
    for part in value.parts:
        domain = Domain(part.shape, (len(part.shape) - 1,))
        parts.append(
            _PartLoops(group, buffers, domain, strict, value=value, part=part, start=start)
        )
        start += part.shape[value.part_axis]
    if all(one.rows == 1 for one in parts):
        return sequence([statement for one in parts for statement in _long_row(one)])
    if len({one.rows for one in parts}) == 1:
        return _rows(parts)
    return sequence([_rows([one]) for one in parts])


def _rows(parts: list[_PartLoops]) -> tirx.Stmt:
    row, body = tirx.Var(ROW, "int32"), []
    for one in parts:
        body += one.row_body(unflatten_axes(row, one.row_axes))
    is_parallel = sum(one.part.size for one in parts) > GRAIN and parts[0].rows > 1
    kind = ForKind.PARALLEL if is_parallel else ForKind.SERIAL
    return For(row, 0, parts[0].rows, kind, sequence(body))


def _long_row(loops: _PartLoops) -> list[tirx.Stmt]:
    """Emit a single row, divided among the threads."""
    (level,) = loops.levels
    row: list[Any] = [0 for _ in loops.row_axes]
    columns = loops.part.size

    def piece(start: Any, count: int) -> list[tirx.Stmt]:
        written = loops.column_loops(level, row, {}, [], (start, count))
        return loops.with_allocations(written)

    if columns <= 2 * GRAIN:
        return piece(0, columns)
    chunk = tirx.Var("chunk", "int32")
    whole = columns // CHUNK
    body = sequence(piece(chunk * CHUNK, CHUNK))
    statements: list[tirx.Stmt] = [For(chunk, 0, whole, ForKind.PARALLEL, body)]
    rest = columns - whole * CHUNK
    return [*statements, *piece(whole * CHUNK, rest)] if rest else statements
