# SPDX-License-Identifier: Apache-2.0
"""Running values of reductions inside a kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
from tvm import tirx
from tvm.tirx import For, ForKind

from amp_ir.loops import math as m
from amp_ir.loops.ir import LANES, Reduction, compute_dtype

_START: dict[str, Callable[[str], Any]] = {
    "sum": lambda dtype: m.constant(0, dtype),
    "prod": lambda dtype: m.constant(1, dtype),
    "max": tirx.min_value,
    "min": tirx.max_value,
    "any": lambda dtype: m.constant(False, dtype),
    "all": lambda dtype: m.constant(True, dtype),
}


def start_of(kind: str, dtype: str) -> Any:
    """The neutral element of a reduction."""
    if dtype.startswith("float") and kind in ("max", "min"):
        return m.constant(-math.inf if kind == "max" else math.inf, dtype)
    return _START[kind](dtype)


def combine(kind: str, a: Any, b: Any) -> Any:
    """One step of a reduction."""
    if kind == "sum":
        return a + b
    if kind == "prod":
        return a * b
    if kind in ("max", "min"):
        return m.maximum(a, b) if kind == "max" else m.minimum(a, b)
    return tirx.any(a, b) if kind == "any" else tirx.all(a, b)


@attrs.frozen(eq=False)
class Accumulator:
    """Partial results of one reduction: `lanes` running values, then one."""

    value: Reduction
    lanes: tirx.Var
    total: tirx.Var
    count: int

    @classmethod
    def declare(cls, value: Reduction, count: int = LANES) -> Accumulator:
        """Accumulators in registers; `count` running values."""
        dtype = compute_dtype(value.dtype)
        lanes = tirx.decl_buffer((count,), _local(dtype), "lanes")
        total = tirx.decl_buffer((1,), _local(dtype), "total")
        return cls(value, lanes, total, count)

    @classmethod
    def declare_shared(cls, value: Reduction, parts: int) -> Accumulator:
        """One value a part, in memory that all tasks see."""
        dtype = compute_dtype(value.dtype)
        lanes = tirx.decl_buffer((parts,), _local(dtype), "parts")
        return cls(value, lanes, lanes, parts)

    @property
    def dtype(self) -> str:
        """The dtype of the running values."""
        return compute_dtype(self.value.dtype)

    def declaration(self) -> tirx.Stmt:
        """Make the memory of the parts."""
        return tirx.AllocBuffer(self.lanes)

    def allocate(self) -> list[tirx.Stmt]:
        """Make the registers and start every running value."""
        start = self._keep(start_of(self.value.kind, self.dtype))
        lane = tirx.Var("lane", "int32")
        vector = ForKind.VECTORIZED if self.count % LANES == 0 else ForKind.SERIAL
        clear = For(lane, 0, self.count, vector, tirx.BufferStore(self.lanes, start, [lane]))
        return [
            tirx.AllocBuffer(self.lanes),
            tirx.AllocBuffer(self.total),
            clear,
            tirx.BufferStore(self.total, start, [0]),
        ]

    def at(self, lane: Any) -> Any:
        """One running value."""
        return self._take(tirx.BufferLoad(self.lanes, [lane]))

    def add(self, lane: Any | None, element: Any) -> tirx.Stmt:
        """Take `element` into a lane, or, without a lane, into the total."""
        buffer, at = (self.total, 0) if lane is None else (self.lanes, lane)
        known = self._take(tirx.BufferLoad(buffer, [at]))
        return tirx.BufferStore(buffer, self._keep(combine(self.value.kind, known, element)), [at])

    def put(self, part: Any, element: Any) -> tirx.Stmt:
        """Set the value of a part."""
        return tirx.BufferStore(self.lanes, self._keep(element), [part])

    def finish(self, more: Accumulator | None = None) -> list[tirx.Stmt]:
        """Fold the lanes (and the parts of `more`) into the total, in order."""
        statements = []
        for source in (self, more) if more is not None else (self,):
            lane = tirx.Var("lane", "int32")
            statements.append(
                For(lane, 0, source.count, ForKind.SERIAL, self.add(None, source.at(lane)))
            )
        return statements

    def result(self) -> Any:
        """The finished value."""
        return self._take(tirx.BufferLoad(self.total, [0]))

    def _keep(self, element: Any) -> Any:
        return m.cast(element, "int32") if self.dtype == "bool" else element

    def _take(self, element: Any) -> Any:
        return tirx.NE(element, m.constant(0, "int32")) if self.dtype == "bool" else element


@attrs.define(eq=False)
class ColumnSums:
    """A reduction over rows: for each part of the rows, one running value a column."""

    value: Reduction
    sums: tirx.Var
    parts: int
    extent: int
    part: Any = 0

    @classmethod
    def declare(cls, value: Reduction, parts: int, extent: int) -> ColumnSums:
        """Memory for the sums of `parts` parts of the rows over `extent` columns."""
        dtype = _local(compute_dtype(value.dtype))
        return cls(value, tirx.decl_buffer((parts * extent,), dtype, "sums"), parts, extent)

    @property
    def kind(self) -> str:
        """Which reduction it is."""
        return self.value.kind

    def allocation(self) -> tirx.Stmt:
        """Make the memory."""
        return tirx.AllocBuffer(self.sums)

    def clear(self, column: Any) -> tirx.Stmt:
        """Start this part's value of a column."""
        start = self._keep(start_of(self.kind, compute_dtype(self.value.dtype)))
        return tirx.BufferStore(self.sums, start, [self.part * self.extent + column])

    def add(self, column: Any, element: Any) -> tirx.Stmt:
        """Take an element into this part's value of a column."""
        at = self.part * self.extent + column
        known = self._take(tirx.BufferLoad(self.sums, [at]))
        return tirx.BufferStore(self.sums, self._keep(combine(self.kind, known, element)), [at])

    def fold(self, column: Any) -> list[tirx.Stmt]:
        """Combine the parts of a column, in order, where those of the first part are.

        Step by step in memory: as one expression a maximum, which reads its arguments three times,
        would be written out three to the power of the parts.
        """
        steps = []
        for part in range(1, self.parts):
            known = self._take(tirx.BufferLoad(self.sums, [column]))
            more = self._take(tirx.BufferLoad(self.sums, [part * self.extent + column]))
            total = self._keep(combine(self.kind, known, more))
            steps.append(tirx.BufferStore(self.sums, total, [column]))
        return steps

    def total(self, column: Any) -> Any:
        """The finished value of a column, after `fold`."""
        return self._take(tirx.BufferLoad(self.sums, [column]))

    def _keep(self, element: Any) -> Any:
        return m.cast(element, "int32") if m.dtype_of(element) == "bool" else element

    def _take(self, element: Any) -> Any:
        is_bool = compute_dtype(self.value.dtype) == "bool"
        return tirx.NE(element, m.constant(0, "int32")) if is_bool else element


def _local(dtype: str) -> str:
    return "int32" if dtype == "bool" else dtype
