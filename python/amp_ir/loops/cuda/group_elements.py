# SPDX-License-Identifier: Apache-2.0
"""The elements that a group's CUDA kernel computes, for every kind of launch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
from tvm import tirx

from amp_ir.ir.tensor_layout import dtype_nbytes
from amp_ir.loops.codegen.accumulate_blocks import BLOCK
from amp_ir.loops.codegen.accumulators import result_of, running_dtype, wide_dtype
from amp_ir.loops.codegen.coordinates import Axis, Position, merged_axes
from amp_ir.loops.codegen.kernel import unflatten_axes
from amp_ir.loops.codegen.kernel_buffers import FlatBuffer
from amp_ir.loops.codegen.levels import Level, assign_levels
from amp_ir.loops.cuda.launch import WARP, ThreadAccumulator, blocked, guarded, kept_dtype, unrolled
from amp_ir.loops.cuda.part_loads import VECTOR_NBYTES
from amp_ir.loops.cuda.thread_writer import ThreadWriter
from amp_ir.loops.group import Domain, Group
from amp_ir.loops.ir import Reduction, TensorSpec, compute_dtype

# What a launch does with the element at a lane.
Take = Callable[[Any, Any], tirx.Stmt]

# Elements a thread computes side by side at most: more would spill registers in long chains.
MAX_WIDTH = 8
# Bytes of tensors that a thread holds at once: half of its registers; the rest is arithmetic's.
MAX_HELD_NBYTES = 512
# Running values of one thread that stay in registers.
MAX_RUNNING = 32
# Steps along a row that are written one after another, so that their loads are under way together.
MOST_UNROLLED = 4
# Blocks that fill the largest GPUs (132 multiprocessors) a few times over. A constant, not a query
# of the device: sums must not depend on it.
MANY_BLOCKS = 528
# Rows of threads in a tile that adds up over rows.
TILE_ROWS = 8
# Shared memory that every block has without opting in to more.
SHARED_NBYTES = 48 * 1024


@attrs.define
class GroupElements:
    """A group with its loops, and the memory that its launches share.

    `width` is the number of elements that a thread computes along the innermost axis.
    """

    group: Group
    buffers: dict[int, FlatBuffer]
    domain: Domain
    strict: bool
    row_axes: list[Axis] = attrs.field(init=False)
    column_axes: list[Axis] = attrs.field(init=False)
    levels: list[Level] = attrs.field(init=False)
    width: int = attrs.field(init=False)
    workspace: list[FlatBuffer] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.row_axes, self.column_axes = merged_axes(self.domain)
        if not self.column_axes:
            self.column_axes = [Axis((), 1, 1)]
        self.levels = assign_levels(self.group)
        if self.domain.keeps_innermost:
            self.width = self.tile_width(self.row_axes[-1].extent, self.levels[0].reductions)
        elif self.only_sums_rows:
            self.width = self.tile_width(self.column_axes[-1].extent, self.levels[0].columns)
        else:
            self.width = self.vector_width(self.column_axes[-1].extent)

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return math.prod(axis.extent for axis in self.row_axes)

    @property
    def chunks(self) -> int:
        """Return the number of vectors in a row."""
        return math.prod(axis.extent for axis in self.column_axes) // self.width

    def vector_width(self, extent: int) -> int:
        """Return the vector width: 16 bytes of the narrowest tensor, if that divides a row."""
        sizes = [
            dtype_nbytes(value.dtype)
            for value in [*self.group.inputs.values(), *self.group.stored]
            if value.size == self.domain.size
        ]
        width = min(MAX_WIDTH, VECTOR_NBYTES // min(sizes, default=4))
        held = sum(
            dtype_nbytes(value.dtype)
            for value in [*self.group.inputs.values(), *self.group.stored]
            if value.size > 1
        )
        while width > 1 and width * held > MAX_HELD_NBYTES:
            width //= 2
        while extent % width:
            width //= 2
        return width

    @property
    def only_sums_rows(self) -> bool:
        """Return whether all reductions run over the rows and no value of a row is stored."""
        stored = {id(value) for value in self.group.stored}
        is_row_plain = not any(
            isinstance(value, Reduction) or id(value) in stored for value in self.group.row
        )
        return bool(self.group.column) and is_row_plain

    def tile_width(self, extent: int, reductions: list[Reduction]) -> int:
        """Return the width at which a tile's sums still fit into shared memory.

        One instruction stores what a thread has of a tensor. Two would write half a sector each:
        no cache of a multiprocessor joins them.
        """
        stored = [dtype_nbytes(one.dtype) for one in self.group.stored if one in self.group.full]
        width = min(self.vector_width(extent), VECTOR_NBYTES // max(stored, default=1))
        sizes = sum(dtype_nbytes(kept_dtype_of(value, is_long=True)) for value in reductions)
        while width > 1 and sizes * TILE_ROWS * WARP * width > SHARED_NBYTES:
            width //= 2
        return width

    def start_level(
        self, level: Level, row: list[Any], row_elements: dict[int, Any], is_writer: Any
    ) -> list[tirx.Stmt]:
        """Emit the values of the row: every thread computes them, one stores them."""
        writer = self.writer(row, None, row_elements, None)
        stores = []
        for value in level.row_values:
            element = writer.row(value)
            if id(value) in self.buffers and value in self.group.stored:
                flat = writer.position.flat_row()
                stores.append(self.buffers[id(value)].store(flat, element))
        return [*writer.allocations, *writer.body, *guarded(is_writer, stores)]

    def stores_rows(self, level: Level) -> bool:
        """Return whether a level stores values of the row."""
        return any(value in self.group.stored for value in level.row_values)

    def shared_row(
        self,
        level: Level,
        parts: list[Any],
        row_elements: dict[int, Any],
        takes: list[tuple[Reduction, Take]],
        share: tuple[Any, int],
        sums: Callable[..., Any] | None = None,
        flush: list[tirx.Stmt] | None = None,
    ) -> list[tirx.Stmt]:
        """Emit every `threads`-th chunk of a row, by this thread; `flush` ends a block.

        Steps that all threads take have no condition: then a thread's loads are on their way
        together, where a branch would wait for each.
        """
        thread, threads = share
        steps, flushes = -(-self.chunks // threads), flush or []
        steps_a_block = max(1, BLOCK // self.width)
        # A block of several steps has its end where it is, whether its last step is whole or not.
        is_split = not flushes or steps_a_block == 1
        whole = self.chunks // threads if is_split else steps
        has_rest = self.chunks % threads > 0

        def visit(step: Any, *, is_partial: bool = has_rest and not is_split) -> list[tirx.Stmt]:
            chunk = tirx.Var("chunk", "int32")
            at = thread if steps == 1 else step * threads + thread
            taken = takes + ([] if sums is None else sums(level, step, chunk))
            body = self.chunk(level, parts, chunk, dict(row_elements), taken)
            inside = chunk < self.chunks if is_partial else None
            return [tirx.Bind(chunk, at), *guarded(inside, body)]

        rest: list[tirx.Stmt] = []
        if whole < steps:
            rest = [*visit(tirx.const(whole, "int32"), is_partial=True), *flushes]
        if not whole:
            return rest
        if sums is not None and steps * self.width <= MAX_RUNNING:
            return [*unrolled(whole, "step", visit), *rest]
        if is_split and whole <= MOST_UNROLLED:
            return [*unrolled(whole, "step", lambda step: [*visit(step), *flushes]), *rest]
        return [*blocked(whole, steps_a_block, visit, flushes), *rest]

    def has_long_shares(self, threads: int, *, is_summed: bool = False) -> bool:
        """Return whether a thread of `threads` takes more than a block of a row's elements.

        `is_summed`: the rows are added up too, with running values for each column in registers.
        """
        taken = -(-self.chunks // threads) * self.width
        return taken > (MAX_RUNNING if is_summed else BLOCK)

    def chunk(
        self,
        level: Level,
        row: list[Any],
        chunk: Any,
        row_elements: dict[int, Any],
        takes: list[tuple[Reduction, Take]],
    ) -> list[tirx.Stmt]:
        """Emit the vector of elements with number `chunk` of a row."""
        outer = self.column_axes[:-1]
        inner = self.column_axes[-1].extent // self.width
        lane = tirx.Var("lane", "int32") if self.width > 1 else None
        place = tirx.floormod(chunk, inner) if outer else chunk
        columns = unflatten_axes(tirx.floordiv(chunk, inner), outer) if outer else []
        column = place * self.width + lane if lane is not None else place
        writer = self.writer(row, [*columns, column], row_elements, lane)
        self.visit(writer, level, takes)
        return writer.statements()

    def visit(
        self, writer: ThreadWriter, level: Level, takes: list[tuple[Reduction, Take]]
    ) -> None:
        """Emit the work at one element. All reads precede all stores: see `inplace_pairs`."""
        elements = [writer.full(value) for value in level.stores]
        taken = [(take, writer.reduced(value)) for value, take in takes]
        for value, element in zip(level.stores, elements, strict=True):
            writer.store(self.buffers[id(value)], element)
        lane = writer.lane if writer.lane is not None else 0
        for take, element in taken:
            writer.body.append(take(lane, element))

    def writer(
        self, row: list[Any], column: list[Any] | None, row_elements: dict[int, Any], lane: Any
    ) -> ThreadWriter:
        """Return a writer at a position; without a column it writes values of the row."""
        axes = self.column_axes
        if column is not None and not axes[-1].dimensions:
            axes, column = [], []
        position = Position(self.domain, self.row_axes, axes, row, column)
        width = self.width if lane is not None else 1
        return ThreadWriter(
            self.group, self.buffers, position, row_elements, self.strict, lane, width=width
        )

    def make_workspace(self, count: int, dtype: str) -> FlatBuffer:
        """Declare memory that blocks share, a parameter of the kernel."""
        name = f"workspace{len(self.workspace)}"
        buffer = FlatBuffer.declare(TensorSpec((count,), dtype), name)
        self.workspace.append(buffer)
        return buffer


def accumulator_of(value: Reduction, count: int = 1, *, is_long: bool = False) -> ThreadAccumulator:
    """Return registers for the running values of a reduction."""
    return ThreadAccumulator.declare(value.kind, compute_dtype(value.dtype), count, is_long=is_long)


def wide_accumulator_of(value: Reduction) -> ThreadAccumulator:
    """Return a register for the combined parts of a reduction."""
    return ThreadAccumulator.declare(value.kind, wide_dtype(value.kind, compute_dtype(value.dtype)))


def accumulator_in(value: Reduction, buffer: tirx.Var) -> ThreadAccumulator:
    """Return the running values of a reduction that are stored in `buffer`."""
    dtype = compute_dtype(value.dtype)
    return ThreadAccumulator(
        value.kind, "bool" if dtype == "bool" else str(buffer.ty.dtype), buffer, 0
    )


def kept_dtype_of(value: Reduction, *, is_long: bool = False) -> str:
    """Return the dtype of a reduction's running values in memory; a long reduction's are wide."""
    dtype = compute_dtype(value.dtype)
    dtype_of = wide_dtype if is_long else running_dtype
    return kept_dtype(dtype_of(value.kind, dtype))


def result_in(value: Reduction, accumulator: ThreadAccumulator, at: Any = 0) -> Any:
    """Return the result of an accumulator, in the compute dtype."""
    return result_of(value, accumulator.totals.result(at))


def adding(accumulator: ThreadAccumulator, start: Any = None) -> Take:
    """Accumulate elements into registers: into one running value, or one per lane."""

    def take(lane: Any, element: Any) -> tirx.Stmt:
        if start is not None:
            return accumulator.add(element, start + lane)
        return accumulator.add(element, lane if accumulator.count > 1 else 0)

    return take


def adding_to(value: Reduction, buffer: tirx.Var, start: Any) -> Take:
    """Accumulate elements into memory that only this thread uses while the rows last."""
    helper = accumulator_in(value, buffer)
    return lambda lane, element: helper.add(element, start + lane)


def named(statements: list[tirx.Stmt], element: Any) -> Any:
    """Name the element, so that its registers may be used again."""
    if str(element.ty.dtype) == "bool":
        return element
    variable = tirx.Var("result", str(element.ty.dtype))
    statements.append(tirx.Bind(variable, element))
    return variable


def both(a: Any, b: Any) -> Any:
    """Return the conjunction of two conditions; None is always true."""
    if a is None or b is None:
        return b if a is None else a
    return tirx.all(a, b)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
