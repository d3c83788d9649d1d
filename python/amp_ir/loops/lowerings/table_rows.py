# SPDX-License-Identifier: Apache-2.0
"""Values of tables to whose rows other rows are added: gradients of look-ups, sums at indices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from tvm import tirx

from amp_ir.loops import math as m
from amp_ir.loops.body_context import let
from amp_ir.loops.builders import flatten, opaque, pointwise
from amp_ir.loops.codegen.kernel_buffers import FlatBuffer
from amp_ir.loops.cpu.scatter_rows import scatter_rows, sum_rows
from amp_ir.loops.ir import TensorSpec, Value, compute_dtype
from amp_ir.loops.lowering_registry import Lowering
from amp_ir.loops.table_sum import TableSum

# A table of so many times the elements of the rows that are added to it is mostly zeros, and which
# row is where takes little beside rows of so many columns.
_FEW = 8


@attrs.frozen(eq=False)
class AddedRows:
    """Rows for a table: row k of `rows` is added to row `id_of(ids, k)`, for all `items`.

    `result` is the table, whose `leading` dimensions together count its rows.
    """

    name: str
    rows: Value
    ids: Sequence[Value]
    id_of: Callable[[Sequence[FlatBuffer], Any], Any]
    items: int
    result: TensorSpec
    leading: int = 1
    padding_idx: int | None = None

    @property
    def height(self) -> int:
        """Return the number of rows of the table."""
        return math.prod(self.result.shape[: self.leading])

    @property
    def width(self) -> int:
        """Return the number of elements in a row."""
        return math.prod(self.result.shape[self.leading :])

    def table(
        self,
        inputs: Sequence[FlatBuffer],
        out: FlatBuffer,
        base: FlatBuffer | None = None,
        **options: Any,
    ) -> TableSum:
        """Return what a kernel computes whose first buffers are the rows and their ids."""
        rows, ids = inputs[0], inputs[1 : 1 + len(self.ids)]
        return TableSum(
            rows, self.items, lambda item: self.id_of(ids, item), out, self.padding_idx, base,
            self.height, self.width, **options,
        )  # fmt: skip


def sums_from_zero(op: Lowering, added: AddedRows) -> Value:
    """Return a table of zeros to which the rows are added."""
    are_few = 0 < added.rows.size * _FEW <= added.result.size and added.width >= _FEW
    # A GPU's kernels add a chunk of items each, wherever their ids lie.
    if are_few and not op.arithmetic_is_free:
        return _by_rows(added)
    return _summed(added, [], added.table, ())


def sums_onto(
    base: Value, added: AddedRows, factors: Sequence[Value] = (), *, in_order: bool = False
) -> Value:
    """Return `base` with the rows, times the factors, added in its memory where nobody reads it.

    See `TableSum` for `in_order`, which a GPU has no kernel for.
    """
    count = 1 + len(added.ids)

    def table_of(inputs: Sequence[FlatBuffer], out: FlatBuffer) -> TableSum:
        numbers = tuple(inputs[count + 1 :])
        return added.table(inputs, out, inputs[count], factors=numbers, in_order=in_order)

    return _summed(added, [base, *factors], table_of, ((0, count),))


def _summed(
    added: AddedRows,
    others: Sequence[Value],
    table_of: Callable[[Sequence[FlatBuffer], FlatBuffer], TableSum],
    inplace: tuple[tuple[int, int], ...],
) -> Value:
    """Return the table of the kernel that reads the rows, their ids and `others`."""

    def emit(inputs: list[FlatBuffer], outputs: list[FlatBuffer]) -> tirx.Stmt:
        return scatter_rows(table_of(inputs, outputs[0]))

    def emit_cuda(inputs: list[FlatBuffer], outputs: list[FlatBuffer]) -> list[tirx.Stmt]:
        from amp_ir.loops.cuda.scatter_rows import scatter_launches

        return scatter_launches(table_of(inputs, outputs[0]))

    inputs = [added.rows, *added.ids, *others]
    return opaque(added.name, inputs, [added.result], emit, inplace, emit_cuda)[0]


def _by_rows(added: AddedRows) -> Value:
    """Return the table as a view of the sums of few rows, which its readers compute.

    A norm and an optimizer's update read the sums; no table of zeros is in memory for them.
    """
    result = added.result

    def emit(inputs: list[FlatBuffer], outputs: list[FlatBuffer]) -> tirx.Stmt:
        return sum_rows(added.table(inputs, outputs[0]), outputs[1])

    specs = [TensorSpec((added.items, added.width), result.dtype)]
    specs.append(TensorSpec((added.height,), "int32"))
    sums, first = opaque(added.name, [added.rows, *added.ids], specs, emit)

    def body(*index: Any) -> Any:
        split = added.leading
        row = flatten(index[:split], result.shape[:split])
        column = flatten(index[split:], result.shape[split:])
        item = let(first[(row,)])
        zero = m.constant(0.0, compute_dtype(result.dtype))
        return m.select(item < 0, zero, sums[(let(m.clamp(item, added.items)), column)])

    return pointwise(result.shape, result.dtype, body)
