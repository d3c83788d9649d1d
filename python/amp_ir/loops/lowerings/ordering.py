# SPDX-License-Identifier: Apache-2.0
"""Lowering of ops that scan a row in order: cumulative sums and products, sorting, topk.

Threads divide the rows; one thread does each, so results never depend on their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from tvm import tirx
from tvm.tirx import For, ForKind

from amp_ir.loops import math as m
from amp_ir.loops.builders import flatten, opaque, reshape, unflatten
from amp_ir.loops.codegen.accumulators import wide_dtype
from amp_ir.loops.codegen.kernel_buffers import FlatBuffer, task_buffer
from amp_ir.loops.cpu.row_order import RowOrder, comes_before, order_row, serial
from amp_ir.loops.ir import TensorSpec, Value, compute_dtype
from amp_ir.loops.lowering_registry import Lowering, lowers


@attrs.frozen
class _Rows:
    """The rows of a tensor of `shape` along `axis`."""

    shape: tuple[int, ...]
    axis: int

    @property
    def length(self) -> int:
        """Number of elements in a row."""
        return self.shape[self.axis]

    @property
    def others(self) -> tuple[int, ...]:
        """Return the extents of the other dimensions."""
        return self.shape[: self.axis] + self.shape[self.axis + 1 :]

    def flat(self, row: Any, item: Any) -> Any:
        """Return the flat position of an element of a row."""
        kept = unflatten(row, self.others)
        return flatten((*kept[: self.axis], item, *kept[self.axis :]), self.shape)

    def each(self, body: Callable[[Any], Sequence[tirx.Stmt]]) -> tirx.Stmt:
        """Emit `body(row)` for every row, in parallel."""
        row, count = tirx.Var("row", "int32"), math.prod(self.others)
        kind = ForKind.PARALLEL if count > 1 else ForKind.SERIAL
        return For(row, 0, count, kind, tirx.SeqStmt(list(body(row))))


@lowers("relax.cumsum", "relax.cumprod")
def scan(op: Lowering, x: Value) -> Value:
    """Emit running sums or products, with the element itself unless `exclusive`.

    The running value takes all elements of a row one by one: for float32 it is float64, as in
    PyTorch on a CPU.
    """
    attributes, result = op.call.attrs, op.results[0]
    source = x if attributes.axis is not None else reshape(x, (x.size,))
    axis = int(attributes.axis) % len(source.shape) if attributes.axis is not None else 0
    rows, dtype = _Rows(source.shape, axis), compute_dtype(result.dtype)
    is_sum = op.name == "relax.cumsum"
    wide = wide_dtype("sum", dtype)

    def emit(inputs: list[FlatBuffer], outputs: list[FlatBuffer]) -> tirx.Stmt:
        def row_body(row: Any) -> list[tirx.Stmt]:
            total = task_buffer(1, wide, "total")
            known = tirx.BufferLoad(total, [0])

            def visit(item: Any) -> tirx.Stmt:
                flat = rows.flat(row, item)
                element = m.cast(inputs[0].load(flat), wide)
                step = tirx.BufferStore(total, known + element if is_sum else known * element, [0])
                store = outputs[0].store(flat, m.cast(known, dtype))
                return tirx.SeqStmt([store, step] if attributes.exclusive else [step, store])

            start = tirx.BufferStore(total, m.constant(0 if is_sum else 1, wide), [0])
            return [tirx.AllocBuffer(total), start, serial(rows.length, "item", visit)]

        return rows.each(row_body)

    spec = TensorSpec(source.shape, result.dtype)
    scanned = opaque("cumsum" if is_sum else "cumprod", [source], [spec], emit)[0]
    return reshape(scanned, result.shape)


def _sorted(
    x: Value, axis: int, specs: Sequence[TensorSpec], wants: Sequence[str], *, descending: bool
) -> tuple[Value, ...]:
    """Return the first elements of each row in order, "values" or "indices", by the specs."""
    rows, count = _Rows(x.shape, axis), max(spec.shape[axis] for spec in specs)

    def emit(inputs: list[FlatBuffer], outputs: list[FlatBuffer]) -> tirx.Stmt:
        def row_body(row: Any) -> list[tirx.Stmt]:
            def key(position: Any) -> Any:
                return _key(inputs[0], rows.flat(row, position))

            dtype = m.dtype_of(key(0))
            order = order_row(rows.length, count, key, dtype, descending=descending)
            statements = list(order.statements)
            for want, output in zip(wants, outputs, strict=True):
                kept = _Rows(output.spec.shape, axis)
                statements.append(_write_row(inputs[0], output, rows, kept, row, order, want))
            return statements

        return rows.each(row_body)

    def emit_cuda(inputs: list[FlatBuffer], outputs: list[FlatBuffer]) -> list[tirx.Stmt]:
        from amp_ir.loops.cuda.launch import guarded
        from amp_ir.loops.cuda.rank_sort import rank_launch

        kept = [_Rows(output.spec.shape, axis) for output in outputs]

        def put(row: Any, item: Any, rank: Any) -> list[tirx.Stmt]:
            at, places = rows.flat(row, item), [one.flat(row, rank) for one in kept]
            stores = [
                output.store(place, _element(inputs[0], output, want, at, item))
                for want, output, place in zip(wants, outputs, places, strict=True)
            ]
            return guarded(rank < kept[0].length, stores)

        return [
            rank_launch(
                math.prod(rows.others),
                rows.length,
                lambda row, item: _key(inputs[0], rows.flat(row, item)),
                lambda a, b: comes_before(a, b, descending=descending),
                put,
            )
        ]

    return opaque("sort", [x], list(specs), emit, emit_cuda=emit_cuda)


def _key(source: FlatBuffer, flat: Any) -> Any:
    """Return the sort key of the element at a flat position."""
    element = source.load(flat)
    return m.cast(element, "int32") if m.dtype_of(element) == "bool" else element


def _element(source: FlatBuffer, output: FlatBuffer, want: str, flat: Any, position: Any) -> Any:
    """Return the element at a flat position, or its position in its row."""
    return m.cast(position, output.spec.dtype) if want == "indices" else source.load(flat)


def _write_row(
    source: FlatBuffer, output: FlatBuffer, rows: _Rows, kept: _Rows, row: Any, order: RowOrder,
    want: str,
) -> tirx.Stmt:  # fmt: skip
    def write(item: Any) -> tirx.Stmt:
        position = order.position(item)
        element = _element(source, output, want, rows.flat(row, position), position)
        return output.store(kept.flat(row, item), element)

    return serial(kept.length, "item", write)


@lowers("relax.sort", "relax.argsort")
def sort(op: Lowering, x: Value) -> Value:
    """Sort elements, or their positions, along one axis; equal ones stay in their order."""
    attributes = op.call.attrs
    want = "values" if op.name == "relax.sort" else "indices"
    axis = int(attributes.axis) % len(x.shape)
    return _sorted(x, axis, op.results, [want], descending=bool(attributes.descending))[0]


@lowers("relax.topk")
def topk(op: Lowering, x: Value) -> Value | tuple[Value, ...]:
    """Return the first k in order along one axis; among equal ones the first."""
    attributes = op.call.attrs
    ret_type = str(attributes.ret_type)
    wants = ["values", "indices"] if ret_type == "both" else [ret_type]
    axis = int(attributes.axis) % len(x.shape)
    found = _sorted(x, axis, op.results, wants, descending=bool(attributes.largest))
    return found if ret_type == "both" else found[0]
