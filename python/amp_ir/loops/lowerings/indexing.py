# SPDX-License-Identifier: Apache-2.0
"""Lowering of indexing: reads are gathers; writes are kernels that take the indices in order.

A write sees its target as [before, indexed..., after]: tasks divide what is not indexed, and each
takes all indices in order. So no two tasks write the same element, and sums do not depend on the
number of threads. Where whole rows are added, a CPU has a kernel that takes them as vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.tirx import For, ForKind

from amp_ir.dialect.indexing import indexed_shape
from amp_ir.loops import math as m
from amp_ir.loops.builders import flatten, opaque, pointwise, reshape, unflatten
from amp_ir.loops.codegen.kernel_buffers import FlatBuffer
from amp_ir.loops.cpu.scatter_rows import write_rows
from amp_ir.loops.ir import Constant, Pointwise, TensorSpec, Value, compute_dtype
from amp_ir.loops.lowering_registry import Lowering, lowers
from amp_ir.loops.lowerings.gather import row_index
from amp_ir.loops.lowerings.table_rows import AddedRows, sums_from_zero, sums_onto

# Lists of the items of a row take longer than what narrower rows save.
_LEAST_COLUMNS = 8


@lowers("amp_ir.index")
def index(op: Lowering, x: Value, *ids: Value, axes: Sequence[int], wraps: bool = True) -> Value:
    """Gather each element from the position that its indices name."""
    result = op.results[0]
    shapes = tuple(one.shape for one in ids)
    _, together, place = indexed_shape(x.shape, shapes, tuple(axes))
    rank = len(together)

    def body(*i: Any) -> Any:
        at = i[place : place + rank]
        kept = iter((*i[:place], *i[place + rank :]))
        rows = {
            axis: row_index(one[at], x.shape[axis]) for axis, one in zip(axes, ids, strict=True)
        }
        return x[tuple(rows[d] if d in rows else next(kept) for d in range(len(x.shape)))]

    return pointwise(result.shape, result.dtype, body)


def _written(
    source: FlatBuffer,
    out: FlatBuffer,
    write_all: Callable[[FlatBuffer], tirx.Stmt],
    *,
    is_sum: bool,
) -> tirx.Stmt:
    """Copy `source`, write, leave the result in `out`; sums are kept in float32 or wider."""
    wide = compute_dtype(out.spec.dtype)
    if not is_sum or wide == out.spec.dtype:
        return tirx.SeqStmt([_copy(source, out), write_all(out)])
    total = FlatBuffer.declare(TensorSpec(out.spec.shape, wide), "total")
    steps = [tirx.AllocBuffer(total.buffer), _copy(source, total), write_all(total)]
    return tirx.SeqStmt([*steps, _copy(total, out)])


def _copy(source: FlatBuffer, target: FlatBuffer) -> tirx.Stmt:
    at = tirx.Var("at", "int32")
    body = target.store(at, source.load(at))
    return For(at, 0, target.spec.size, ForKind.PARALLEL, body)


def _each(extent: int, name: str, kind: ForKind, body: Callable[[Any], tirx.Stmt]) -> tirx.Stmt:
    at = tirx.Var(name, "int32")
    return For(at, 0, extent, kind, body(at))


def _wrapped(element: Any, extent: int) -> Any:
    at = tirx.Cast("int32", element)
    wrapped = tirx.Select(at < tirx.const(0, "int32"), at + tirx.const(extent, "int32"), at)
    return m.clamp(wrapped, extent)


def _broadcast_flat(position: Sequence[Any], shape: Sequence[int]) -> Any:
    """Return the flat position in a tensor of `shape` that broadcasts to `position`."""
    tail = position[len(position) - len(shape) :]
    at = tuple(0 if n == 1 else i for i, n in zip(tail, shape, strict=True))
    return flatten(at, shape)


@lowers("amp_ir.index_put")
def index_put(
    op: Lowering,
    x: Value,
    values: Value,
    *ids: Value,
    axes: Sequence[int],
    accumulate: bool = False,
    wraps: bool = True,
) -> Value:
    """Copy x, then write in order; see the top of the file."""
    shapes = tuple(one.shape for one in ids)
    whole = None if op.arithmetic_is_free else _rows_at(x, values, ids, tuple(axes))
    if whole is not None and accumulate and "float" in x.dtype:
        return _with_rows(op, x, whole)
    combine = _combine("add" if accumulate else "update", x.dtype)
    if whole is not None:
        return _written_rows(x, whole, combine, is_sum=accumulate)
    _, together, place = indexed_shape(x.shape, shapes, tuple(axes))
    kept_axes = [d for d in range(len(x.shape)) if d not in axes]
    kept_shape = [x.shape[d] for d in kept_axes]

    def emit(inputs: list[FlatBuffer], outputs: list[FlatBuffer]) -> tirx.Stmt:
        source, new, *indices = inputs

        def write(target: FlatBuffer, task: Any, item: Any) -> tirx.Stmt:
            kept = unflatten(task, kept_shape)
            at = unflatten(item, together)
            rows = {
                axis: _wrapped(one.load(_broadcast_flat(at, shape)), x.shape[axis])
                for axis, one, shape in zip(axes, indices, shapes, strict=True)
            }
            by_axis = dict(zip(kept_axes, kept, strict=True)) | rows
            to = flatten(tuple(by_axis[d] for d in range(len(x.shape))), x.shape)
            position = (*kept[:place], *at, *kept[place:])
            element = new.load(_broadcast_flat(position, values.shape))
            return target.store(to, combine(target.load(to), element) if accumulate else element)

        return _written(
            source, outputs[0], _in_order(kept_shape, math.prod(together), write),
            is_sum=accumulate,
        )  # fmt: skip

    return opaque("index_put", [x, values, *ids], [op.results[0]], emit)[0]


def _rows_at(
    x: Value, values: Value, ids: Sequence[Value], axes: tuple[int, ...]
) -> AddedRows | None:
    """Return the rows that are added to x, whose leading axes are indexed; None if others are."""
    shape, leading = ids[0].shape, len(axes)
    is_plain = axes == tuple(range(leading)) and all(one.shape == shape for one in ids)
    if not is_plain or values.shape != (*shape, *x.shape[leading:]):
        return None
    if math.prod(x.shape[leading:]) < _LEAST_COLUMNS:
        return None

    def id_of(buffers: Sequence[FlatBuffer], item: Any) -> Any:
        pairs = zip(buffers, x.shape, strict=False)
        at = tuple(_wrapped(one.load(item), n) for one, n in pairs)
        return flatten(at, x.shape[:leading])

    spec = TensorSpec(x.shape, x.dtype)
    return AddedRows("index_put", values, ids, id_of, math.prod(shape), spec, leading)


def _with_rows(op: Lowering, x: Value, added: AddedRows) -> Value:
    return sums_from_zero(op, added) if _is_zero(x) else sums_onto(x, added, in_order=True)


def _written_rows(
    x: Value, whole: AddedRows, combine: Callable[[Any, Any], Any], *, is_sum: bool
) -> Value:
    """Return x after its rows have been combined with others, one after the other."""

    def emit(inputs: list[FlatBuffer], outputs: list[FlatBuffer]) -> tirx.Stmt:
        source, rows, *ids = inputs

        def write_all(target: FlatBuffer) -> tirx.Stmt:
            def id_of(item: Any) -> Any:
                return whole.id_of(ids, item)

            return write_rows(rows, whole.items, id_of, target, whole.width, combine)

        return _written(source, outputs[0], write_all, is_sum=is_sum)

    return opaque(whole.name, [x, whole.rows, *whole.ids], [whole.result], emit)[0]


def _is_zero(x: Value) -> bool:
    """Return whether all elements are known to be zero."""
    if isinstance(x, Constant):
        return x.number == 0
    is_filled = isinstance(x, Pointwise) and x.is_view and len(x.reads) == 1
    return is_filled and _is_zero(x.reads[0].value)


def _in_order(
    task_shape: Sequence[int], items: int, write: Callable[[FlatBuffer, Any, Any], tirx.Stmt]
) -> Callable[[FlatBuffer], tirx.Stmt]:
    """Emit loops over tasks, in parallel, and over the items of each, in order."""
    tasks = math.prod(task_shape)
    kind = ForKind.PARALLEL if tasks > 1 else ForKind.SERIAL

    def loops(target: FlatBuffer) -> tirx.Stmt:
        return _each(
            tasks, "task", kind,
            lambda task: _each(
                items, "item", ForKind.SERIAL, lambda item: write(target, task, item)
            ),
        )  # fmt: skip

    return loops


@lowers("amp_ir.scatter_add")
def scatter_add(op: Lowering, x: Value, ids: Value, src: Value, *, axis: int) -> Value:
    """Copy x, then add in order along `axis`; see the top of the file."""
    return _scattered(op, x, ids, src, axis, "add")


@lowers("relax.scatter_elements")
def scatter_elements(op: Lowering, x: Value, ids: Value, src: Value) -> Value:
    """Copy x, then write in order along `axis`; the last write of a position wins."""
    return _scattered(op, x, ids, src, int(op.call.attrs.axis), str(op.call.attrs.reduction))


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "update": lambda _old, new: new,
    "add": lambda old, new: old + new,
    "mul": lambda old, new: old * new,
    "max": m.maximum,
    "min": m.minimum,
}


def _combine(reduction: str, dtype: str) -> Callable[[Any, Any], Any]:
    """Return how an element is combined with a new one; a sum of booleans is true or false."""
    if dtype != "bool" or reduction == "update":
        return _COMBINE[reduction]
    return tirx.any if reduction in ("add", "max") else tirx.all


def _scattered(op: Lowering, x: Value, ids: Value, src: Value, axis: int, reduction: str) -> Value:
    axis %= len(x.shape)
    others = [n for d, n in enumerate(ids.shape) if d != axis]
    combine = _combine(reduction, x.dtype)
    rows = _row_ids(x, ids, src) if axis == 0 and not op.arithmetic_is_free else None
    whole = None if rows is None else _rows_at(x, src, [rows], (0,))
    if whole is not None and reduction == "add" and "float" in x.dtype:
        return _with_rows(op, x, whole)
    if whole is not None:
        return _written_rows(x, whole, combine, is_sum=reduction in ("add", "mul"))

    def emit(inputs: list[FlatBuffer], outputs: list[FlatBuffer]) -> tirx.Stmt:
        source, places, added = inputs

        def write(target: FlatBuffer, task: Any, item: Any) -> tirx.Stmt:
            kept = unflatten(task, others)
            at = (*kept[:axis], item, *kept[axis:])
            row = _wrapped(places.load(flatten(at, ids.shape)), x.shape[axis])
            to = flatten((*kept[:axis], row, *kept[axis:]), x.shape)
            element = added.load(flatten(at, src.shape))
            return target.store(to, combine(target.load(to), element))

        writes = _in_order(others, ids.shape[axis], write)
        is_sum = reduction in ("add", "mul")
        return _written(source, outputs[0], writes, is_sum=is_sum)

    return opaque("scatter", [x, ids, src], [op.results[0]], emit)[0]


def _row_ids(x: Value, ids: Value, src: Value) -> Value | None:
    """Return the index of each row, where `ids` [n, ...] repeats one along each of x; else None."""
    if ids.shape != src.shape or ids.shape[1:] != x.shape[1:] or not isinstance(ids, Pointwise):
        return None
    if not ids.is_view or len(ids.reads) != 1 or ids.reads[0].place != "broadcast":
        return None
    once = ids.reads[0].value
    is_a_row = len(once.shape) == len(ids.shape) and once.size == once.shape[0] == ids.shape[0]
    return reshape(once, (once.size,)) if is_a_row else None
