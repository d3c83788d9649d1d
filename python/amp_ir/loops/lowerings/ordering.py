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
from amp_ir.loops.ir import TensorSpec, Value, compute_dtype
from amp_ir.loops.lowering_registry import Lowering, lowers

# As wide as an address: from two neighbours of 32 bits, stored at once, LLVM may take both for the
# address of an element (seen for rows of four with AVX2).
_POSITION = "int64"


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


def _serial(extent: Any, name: str, body: Callable[[Any], tirx.Stmt]) -> tirx.Stmt:
    at = tirx.Var(name, "int32")
    return For(at, 0, extent, ForKind.SERIAL, body(at))


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
            return [tirx.AllocBuffer(total), start, _serial(rows.length, "item", visit)]

        return rows.each(row_body)

    spec = TensorSpec(source.shape, result.dtype)
    scanned = opaque("cumsum" if is_sum else "cumprod", [source], [spec], emit)[0]
    return reshape(scanned, result.shape)


def _comes_before(a: Any, b: Any, *, descending: bool) -> Any:
    """Return whether a strictly precedes b; NaN is larger than everything, as in PyTorch."""
    if descending:
        a, b = b, a
    return tirx.any(a < b, tirx.all(m.isnan(b), tirx.Not(m.isnan(a))))


@attrs.frozen(eq=False)
class _RowSort:
    """A stable merge sort of one row's positions, from the bottom up.

    The positions go back and forth between two temporary rows; the places in the two runs being
    merged are in memory, where TVM's simplifier does not look.
    """

    length: int
    key: Callable[[Any], Any]
    descending: bool
    rows: tuple[tirx.Var, tirx.Var] = attrs.field(init=False)
    places: tirx.Var = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        made = [task_buffer(self.length, _POSITION, name) for name in ("order", "merged")]
        object.__setattr__(self, "rows", tuple(made))
        places = task_buffer(2, _POSITION, "places")
        object.__setattr__(self, "places", places)

    def statements(self) -> tuple[list[tirx.Stmt], tirx.Var]:
        """Emit the sort; return it and the temporary row that holds the order at its end."""
        now, other = self.rows
        statements: list[tirx.Stmt] = [
            tirx.AllocBuffer(now),
            tirx.AllocBuffer(other),
            tirx.AllocBuffer(self.places),
            _serial(
                self.length,
                "at",
                lambda at: tirx.BufferStore(self.rows[0], m.cast(at, _POSITION), [at]),
            ),
        ]
        width = 1
        while width < self.length:
            statements.append(self._pass(now, other, width))
            now, other, width = other, now, 2 * width
        return statements, now

    def _pass(self, source: tirx.Var, target: tirx.Var, width: int) -> tirx.Stmt:
        runs = -(-self.length // (2 * width))
        return _serial(runs, "run", lambda run: self._merge(source, target, run * 2 * width, width))

    def _merge(self, source: tirx.Var, target: tirx.Var, low: Any, width: int) -> tirx.Stmt:
        left, right = (tirx.BufferLoad(self.places, [k]) for k in (0, 1))
        middle = tirx.min(low + width, self.length)
        high = tirx.min(low + 2 * width, self.length)

        def position(place: Any) -> Any:
            return tirx.BufferLoad(source, [m.clamp(place, self.length)])

        def take(item: Any) -> tirx.Stmt:
            # Not by negation: TVM takes the contrary of `a < b` for `b <= a`, which is false for
            # NaN too.
            keys = self.key(position(right)), self.key(position(left))
            is_earlier = _comes_before(*keys, descending=self.descending)
            from_right = tirx.all(right < high, tirx.any(left >= middle, is_earlier))
            return tirx.IfThenElse(
                from_right, self._move(target, low + item, 1, position(right)),
                self._move(target, low + item, 0, position(left)),
            )  # fmt: skip

        return tirx.SeqStmt([
            tirx.BufferStore(self.places, m.cast(low, _POSITION), [0]),
            tirx.BufferStore(self.places, m.cast(middle, _POSITION), [1]),
            _serial(high - low, "item", take),
        ])  # fmt: skip

    def _move(self, target: tirx.Var, to: Any, run: int, position: Any) -> tirx.Stmt:
        place = tirx.BufferLoad(self.places, [run])
        step = tirx.BufferStore(self.places, place + tirx.const(1, _POSITION), [run])
        return tirx.SeqStmt([tirx.BufferStore(target, position, [to]), step])


def _sorted(
    x: Value, axis: int, specs: Sequence[TensorSpec], wants: Sequence[str], *, descending: bool
) -> tuple[Value, ...]:
    """Return the first elements of each row in order, "values" or "indices", by the specs."""
    rows = _Rows(x.shape, axis)

    def emit(inputs: list[FlatBuffer], outputs: list[FlatBuffer]) -> tirx.Stmt:
        def row_body(row: Any) -> list[tirx.Stmt]:
            def key(position: Any) -> Any:
                return _key(inputs[0], rows.flat(row, position))

            statements, order = _RowSort(rows.length, key, descending).statements()
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
                lambda a, b: _comes_before(a, b, descending=descending),
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
    source: FlatBuffer, output: FlatBuffer, rows: _Rows, kept: _Rows, row: Any, order: Any,
    want: str,
) -> tirx.Stmt:  # fmt: skip
    def write(item: Any) -> tirx.Stmt:
        position = tirx.BufferLoad(order, [item])
        element = _element(source, output, want, rows.flat(row, position), position)
        return output.store(kept.flat(row, item), element)

    return _serial(kept.length, "item", write)


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
