# SPDX-License-Identifier: Apache-2.0
"""Building blocks of a CUDA kernel in TIR: launches, barriers, shuffles, reductions over threads.

A kernel function may hold several launches; they run one after the other. In each, `threads`
threads of a block share memory and meet at barriers, so every thread must reach every barrier and
every shuffle: guards for a part of the threads go around stores, not around these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
from tvm import ir, tirx
from tvm.tirx import For, ForKind

from amp_ir.loops import math as m
from amp_ir.loops.codegen.accumulate_blocks import Loop
from amp_ir.loops.codegen.accumulators import combine, running_dtype, start_of
from amp_ir.loops.codegen.statements import sequence
from amp_ir.loops.ir import ReduceKind

WARP = 32
# Default threads of a block: enough warps to hide loads, and several blocks fit on a
# multiprocessor.
THREADS = 256
_ALL_LANES = 0xFFFFFFFF


def launch(blocks: int, threads: int, body: Callable[[Any, Any], list[tirx.Stmt]]) -> tirx.Stmt:
    """Run `body(block, thread)` in `threads` threads of each of `blocks` blocks."""
    block, thread = tirx.Var("block", "int32"), tirx.Var("thread", "int32")
    inner = _extent(thread, "threadIdx.x", threads, sequence(body(block, thread)))
    return _extent(block, "blockIdx.x", blocks, inner)


def _extent(variable: tirx.Var, tag: str, extent: int, body: tirx.Stmt) -> tirx.Stmt:
    thread_index = 1  # IterVar's ThreadIndex
    axis = tirx.IterVar(ir.Range(0, extent), variable, thread_index, tag)
    return tirx.AttrStmt(axis, "thread_extent", tirx.const(extent, "int32"), body)


def guarded(condition: Any | None, statements: Sequence[tirx.Stmt]) -> list[tirx.Stmt]:
    """Run the statements where `condition` is true; None: everywhere."""
    if condition is None or not statements:
        return list(statements)
    return [tirx.IfThenElse(condition, sequence(statements), None)]


def unrolled(extent: int, name: str, body: Callable[[Any], list[tirx.Stmt]]) -> list[tirx.Stmt]:
    """Unroll `body(i)` for i in [0, extent), so that arrays indexed by i are registers."""
    if extent == 1:
        return body(tirx.const(0, "int32"))
    at = tirx.Var(name, "int32")
    return [For(at, 0, extent, ForKind.UNROLLED, sequence(body(at)))]


def synchronise() -> tirx.Stmt:
    """Emit a barrier for the threads of a block; earlier writes are visible after it."""
    return tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", ir.StringImm("shared")))


def shuffle_xor(element: Any, mask: int) -> Any:
    """Exchange elements with the thread of this warp whose lane is this one's xor `mask`."""
    return tirx.call_intrin(
        m.dtype_of(element), "tirx.tvm_warp_shuffle_xor",
        tirx.const(_ALL_LANES, "uint32"), element, mask, WARP, WARP,
    )  # fmt: skip


def local_buffer(count: int, dtype: str, name: str) -> tirx.Var:
    """Declare a thread-private array: registers, where all indices are compile-time constants."""
    return tirx.decl_buffer((count,), dtype, name, scope="local")


@attrs.frozen(eq=False)
class ThreadAccumulator:
    """The running values of one reduction in a thread: `count` of them, side by side.

    Bool is stored as int32. For a long sum, `wide` takes the running values at the end of each
    block (`flush`): see accumulate_blocks.py.
    """

    kind: ReduceKind
    dtype: str
    running: tirx.Var
    count: int
    wide: ThreadAccumulator | None = None

    @classmethod
    def declare(
        cls, kind: ReduceKind, dtype: str, count: int = 1, *, is_long: bool = False
    ) -> ThreadAccumulator:
        """Declare registers for `count` running values of elements of `dtype`."""
        running = running_dtype(kind, dtype)
        buffer = local_buffer(count, kept_dtype(running), "running")
        wide = None
        if is_long and kind == "sum" and dtype.startswith("float"):
            wide = cls(kind, "float64", local_buffer(count, "float64", "wide"), count)
        return cls(kind, running, buffer, count, wide)

    @property
    def totals(self) -> ThreadAccumulator:
        """Return the values that hold the sum after the last block."""
        return self if self.wide is None else self.wide

    def start(self) -> list[tirx.Stmt]:
        """Allocate the registers and set every running value to the neutral element."""
        clears = unrolled(self.count, "at", lambda at: [self.clear(at)])
        more = [] if self.wide is None else self.wide.start()
        return [tirx.AllocBuffer(self.running), *clears, *more]

    def flush(self) -> list[tirx.Stmt]:
        """End a block."""
        wide = self.wide
        if wide is None:
            return []
        return unrolled(
            self.count, "at", lambda at: [wide.add(self.result(at), at), self.clear(at)]
        )

    def clear(self, at: Any) -> tirx.Stmt:
        """Set a running value to the neutral element."""
        return self.put(start_of(self.kind, self.dtype), at)

    def add(self, element: Any, at: Any = 0) -> tirx.Stmt:
        """Accumulate an element into a running value."""
        return self.put(combine(self.kind, self.result(at), m.cast(element, self.dtype)), at)

    def put(self, element: Any, at: Any = 0) -> tirx.Stmt:
        """Store a running value."""
        kept = m.cast(element, kept_dtype(self.dtype))
        return tirx.BufferStore(self.running, kept, [at])

    def result(self, at: Any = 0) -> Any:
        """Return a running value."""
        return self.taken(tirx.BufferLoad(self.running, [at]))

    def taken(self, element: Any) -> Any:
        """Convert an element as stored in memory to the compute dtype."""
        return tirx.NE(element, m.constant(0, "int32")) if self.dtype == "bool" else element

    def over_threads(self, threads: int, thread: Any, at: int = 0) -> list[tirx.Stmt]:
        """Combine the running values `at` of `threads` threads; all of them get the result.

        The order is fixed: a butterfly within each warp, then one over the warps, computed by every
        warp. Needs `threads` to be a power of two; below 32 it combines that many neighbours.
        """
        # A maximum reads the other's value twice, once under a condition: a shuffle must not be.
        other = local_buffer(1, kept_dtype(self.dtype), "other")
        theirs = self.taken(tirx.BufferLoad(other, [0]))
        statements: list[tirx.Stmt] = [tirx.AllocBuffer(other)]

        def butterfly(count: int) -> list[tirx.Stmt]:
            exchanges = [
                tirx.BufferStore(other, shuffle_xor(self._raw(at), mask), [0])
                for mask in _masks(count)
            ]
            return [step for exchange in exchanges for step in (exchange, self.add(theirs, at))]

        statements += butterfly(min(threads, WARP))
        warps = threads // WARP
        if warps <= 1:
            return statements
        shared = tirx.decl_buffer((warps,), kept_dtype(self.dtype), "warps", scope="shared")
        mine = tirx.BufferStore(shared, self._raw(at), [tirx.floordiv(thread, WARP)])
        is_first = tirx.EQ(tirx.floormod(thread, WARP), tirx.const(0, "int32"))
        its = tirx.floormod(thread, warps)
        statements += [
            tirx.AllocBuffer(shared),
            *guarded(is_first, [mine]),
            synchronise(),
            tirx.BufferStore(self.running, tirx.BufferLoad(shared, [its]), [at]),
        ]
        return statements + butterfly(warps)

    def _raw(self, at: int) -> Any:
        return tirx.BufferLoad(self.running, [at])


def kept_dtype(dtype: str) -> str:
    """Return the dtype in which running values of a compute dtype are stored in memory."""
    return "int32" if dtype == "bool" else dtype


def loop(steps: int, name: str, body: Callable[[Any], list[tirx.Stmt]]) -> list[tirx.Stmt]:
    """Emit `body(step)` for each step in [0, steps)."""
    if steps == 1:
        return body(tirx.const(0, "int32"))
    at = tirx.Var(name, "int32")
    return [For(at, 0, steps, ForKind.SERIAL, sequence(body(at)))]


def blocked(
    steps: int, size: int, body: Callable[[Any], list[tirx.Stmt]], flush: list[tirx.Stmt]
) -> list[tirx.Stmt]:
    """Emit `body(step)` for each step, with `flush` after every `size` of them and at the end."""
    if not flush:
        return loop(steps, "step", body)
    steps_loop = Loop("step", steps).cut(size)
    return [steps_loop.around(body(steps_loop.at), flush)]


def _masks(threads: int) -> list[int]:
    masks = []
    while threads > 1:
        threads //= 2
        masks.append(threads)
    return masks
