# SPDX-License-Identifier: Apache-2.0
"""Running values of reductions inside a kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
from tvm import tirx
from tvm.tirx import For, ForKind

from amp_ir.ir.vector_instructions import LANES
from amp_ir.loops import math as m
from amp_ir.loops.ir import Reduction, compute_dtype

_START: dict[str, Callable[[str], Any]] = {
    "sum": lambda dtype: m.constant(0, dtype),
    "prod": lambda dtype: m.constant(1, dtype),
    "max": tirx.min_value,
    "largest": tirx.min_value,
    "min": tirx.max_value,
    "any": lambda dtype: m.constant(False, dtype),
    "all": lambda dtype: m.constant(True, dtype),
}


def start_of(kind: str, dtype: str) -> Any:
    """Return the neutral element of a reduction."""
    if dtype.startswith("float") and kind in ("max", "largest", "min"):
        return m.constant(math.inf if kind == "min" else -math.inf, dtype)
    return _START[kind](dtype)


def combine(kind: str, a: Any, b: Any) -> Any:
    """Combine two values of a reduction."""
    if kind == "sum":
        return a + b
    if kind == "prod":
        return a * b
    if kind == "largest":
        return m.larger(a, b)
    if kind in ("max", "min"):
        return m.maximum(a, b) if kind == "max" else m.minimum(a, b)
    return tirx.any(a, b) if kind == "any" else tirx.all(a, b)


def running_dtype(kind: str, dtype: str) -> str:
    """Return the dtype of running values for elements of `dtype`.

    In a product each rounding remains as a relative error, whatever is multiplied later: float32
    blocks do not help, so products run in float64.
    """
    return wide_dtype(kind, dtype) if kind == "prod" else dtype


def wide_dtype(kind: str, dtype: str) -> str:
    """Return the dtype in which block results for elements of `dtype` are combined."""
    return "float64" if kind in ("sum", "prod") and dtype == "float32" else dtype


@attrs.frozen(eq=False)
class Running:
    """`count` running values of one kind of reduction in memory; bool is stored as int32."""

    kind: str
    dtype: str
    buffer: tirx.Var
    count: int

    @classmethod
    def declare(cls, kind: str, dtype: str, count: int, name: str) -> Running:
        """Declare the memory of the values."""
        kept = "int32" if dtype == "bool" else dtype
        return cls(kind, dtype, tirx.decl_buffer((count,), kept, name), count)

    def allocation(self) -> tirx.Stmt:
        """Allocate the memory."""
        return tirx.AllocBuffer(self.buffer)

    def start(self, at: Any) -> tirx.Stmt:
        """Set a value to the neutral element."""
        return self.put(at, start_of(self.kind, self.dtype))

    def add(self, at: Any, element: Any) -> tirx.Stmt:
        """Accumulate an element into a value."""
        return self.put(at, combine(self.kind, self.at(at), m.cast(element, self.dtype)))

    def put(self, at: Any, element: Any) -> tirx.Stmt:
        """Store a value."""
        return tirx.BufferStore(self.buffer, m.cast(element, str(self.buffer.ty.dtype)), [at])

    def at(self, at: Any) -> Any:
        """Load a value."""
        element = tirx.BufferLoad(self.buffer, [at])
        is_bool = self.dtype == "bool"
        return tirx.NE(element, m.constant(0, "int32")) if is_bool else element

    def flush(self, wide: Running, at: Any) -> tirx.Stmt:
        """End a block: add the running value to `wide` and restart it."""
        return tirx.SeqStmt([wide.add(at, self.at(at)), self.start(at)])


def needs_blocks(value: Reduction) -> bool:
    """Return whether the running value accumulates rounding error that blocks would limit."""
    return value.kind == "sum" and compute_dtype(value.dtype).startswith("float")


def result_of(value: Reduction, total: Any) -> Any:
    """Return the result of a reduction in compute dtype: `total`, rounded once."""
    if value.divisor == 0:
        total = m.constant(math.nan, m.dtype_of(total))
    elif value.divisor != 1:
        # Not a product with 1 / divisor, which has a rounding of its own.
        total = total / m.constant(value.divisor, m.dtype_of(total))
    return m.cast(total, compute_dtype(value.dtype))


@attrs.frozen(eq=False)
class Accumulator:
    """Partial results of one reduction: `lanes` running values, which are then combined into one.

    For a long sum, `wide` takes the value of each lane at the end of each block, and `total`, which
    takes the elements outside the lanes, is wide too: see accumulate_blocks.py.
    """

    value: Reduction
    lanes: Running
    wide: Running | None
    total: Running
    finished: Running

    @classmethod
    def declare(cls, value: Reduction, count: int = LANES, *, is_long: bool = False) -> Accumulator:
        """Declare accumulators in registers: `count` running values, in blocks if it `is_long`."""
        kind, dtype = value.kind, compute_dtype(value.dtype)
        running, kept = running_dtype(kind, dtype), wide_dtype(kind, dtype)
        finished = Running.declare(kind, dtype, 1, "finished")
        lanes = Running.declare(kind, running, count, "lanes")
        if not (is_long and needs_blocks(value)):
            total = finished if running == dtype else Running.declare(kind, running, 1, "total")
            return cls(value, lanes, None, total, finished)
        wide = Running.declare(kind, kept, count, "wide")
        return cls(value, lanes, wide, Running.declare(kind, kept, 1, "total"), finished)

    @staticmethod
    def declare_shared(value: Reduction, parts: int) -> Running:
        """Declare one value per part, in memory that all tasks share."""
        dtype = wide_dtype(value.kind, compute_dtype(value.dtype))
        return Running.declare(value.kind, dtype, parts, "parts")

    def allocate(self) -> list[tirx.Stmt]:
        """Allocate the registers and start every running value."""
        buffers = [self.lanes, self.total]
        buffers += [] if self.wide is None else [self.wide]
        buffers += [] if self.finished is self.total else [self.finished]
        statements = [one.allocation() for one in buffers]
        for one in buffers:
            statements.append(over(one.count, one.start))
        return statements

    def add(self, lane: Any | None, element: Any) -> tirx.Stmt:
        """Accumulate `element` into a lane or, without a lane, into the total."""
        return self.total.add(0, element) if lane is None else self.lanes.add(lane, element)

    def flush(self) -> list[tirx.Stmt]:
        """End a block."""
        wide = self.wide
        if wide is None:
            return []
        return [over(wide.count, lambda lane: self.lanes.flush(wide, lane))]

    def at(self, lane: Any) -> Any:
        """Return the result of one lane after the last block."""
        return result_of(self.value, (self.wide or self.lanes).at(lane))

    def gather(self) -> list[tirx.Stmt]:
        """Fold the lanes into the total, in a fixed order."""
        return _fold(self.wide or self.lanes, self.total)

    def finish(self, more: Running | None = None) -> list[tirx.Stmt]:
        """Fold the lanes (and the parts of `more`) into the total and store it as the result."""
        statements = self.gather()
        if more is not None:
            statements += _in_order(more, self.total)
        if self.finished is not self.total or self.value.divisor != 1:
            statements.append(self.finished.put(0, result_of(self.value, self.total.at(0))))
        return statements

    def sum_so_far(self) -> Any:
        """Return the total after `gather`, still in the wide dtype."""
        return self.total.at(0)

    def result(self) -> Any:
        """Return the finished value."""
        return self.finished.at(0)


def over(count: int, body: Callable[[Any], tirx.Stmt]) -> tirx.Stmt:
    """Run `body(lane)` for `count` values, vectorised where they fill a vector."""
    if count == 1:
        return body(tirx.const(0, "int32"))
    lane = tirx.Var("lane", "int32")
    if count % LANES:
        return For(lane, 0, count, ForKind.SERIAL, body(lane))
    if count == LANES:
        return For(lane, 0, LANES, ForKind.VECTORIZED, body(lane))
    step = tirx.Var("step", "int32")
    vector = For(lane, 0, LANES, ForKind.VECTORIZED, body(step * LANES + lane))
    return For(step, 0, count // LANES, ForKind.SERIAL, vector)


def _in_order(source: Running, total: Running) -> list[tirx.Stmt]:
    lane = tirx.Var("lane", "int32")
    return [For(lane, 0, source.count, ForKind.SERIAL, total.add(0, source.at(lane)))]


def _fold(source: Running, total: Running) -> list[tirx.Stmt]:
    """Add the upper half of the values to the lower half until one is left: log2(n) roundings."""
    if source.dtype == "bool" or source.count != LANES:
        return _in_order(source, total)
    statements: list[tirx.Stmt] = []
    half = source.count // 2
    while half >= 1:
        lane: Any = tirx.Var("lane", "int32") if half > 1 else tirx.const(0, "int32")
        halved = source.add(lane, source.at(lane + half))
        vector = ForKind.VECTORIZED
        statements.append(For(lane, 0, half, vector, halved) if half > 1 else halved)
        half //= 2
    return [*statements, total.add(0, source.at(0))]


def ends_of_block(accumulators: list[Any]) -> list[tirx.Stmt]:
    """Return the statement that ends a block in each of them."""
    return [statement for accumulator in accumulators for statement in accumulator.flush()]
