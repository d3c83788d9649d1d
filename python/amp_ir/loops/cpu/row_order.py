# SPDX-License-Identifier: Apache-2.0
"""The positions of a row's elements in order on a CPU: all of them, or the first few.

A row is sorted as whole numbers of 64 bits, whose order is the one that is asked for. An element of
at most 32 bits and its position are one such number; a wider element is one, beside its position.
So no position is followed to an element, and equal elements are in the order of their positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
from tvm import tirx
from tvm.tirx import For, ForKind

from amp_ir.loops import math as m
from amp_ir.loops.codegen.kernel_buffers import task_buffer
from amp_ir.loops.codegen.statements import sequence

# Of positions too: from two neighbours of 32 bits, stored at once, LLVM may take both for the
# address of an element (seen for rows of four with AVX2).
_NUMBER, _BITS = "int64", 64
# So few are inserted into a list of the first ones, of rows so many times as long.
_MOST_SELECTED, _LEAST_RATIO = 64, 4
# Rows from which on digits are counted; to begin with all counts takes longer than to merge.
_LEAST_COUNTED = 256
_DIGIT_BITS = 8
_VALUES = 1 << _DIGIT_BITS


def serial(extent: Any, name: str, body: Callable[[Any], tirx.Stmt]) -> tirx.Stmt:
    """Emit `body(at)` for each number below `extent`."""
    at = tirx.Var(name, "int32")
    return For(at, 0, extent, ForKind.SERIAL, body(at))


@attrs.frozen(eq=False)
class RowOrder:
    """The statements that order a row, and `position(k)`, where the k-th element in order is."""

    statements: Sequence[tirx.Stmt]
    position: Callable[[Any], Any]


def order_row(
    length: int, count: int, element: Callable[[Any], Any], dtype: str, *, descending: bool
) -> RowOrder:
    """Order a row of elements of `dtype`, of which the first `count` positions are read.

    NaN is larger than everything, as in PyTorch, and the order is stable.
    """
    items = _items(element, dtype, descending=descending)
    if count <= _MOST_SELECTED and count * _LEAST_RATIO <= length:
        return _selected(items, length, count)
    order = _Counting if length >= _LEAST_COUNTED else _Merge
    return order(items, length).ordered()


def comes_before(a: Any, b: Any, *, descending: bool) -> Any:
    """Return whether a strictly precedes b; NaN is larger than everything, as in PyTorch."""
    if descending:
        a, b = b, a
    return tirx.any(a < b, tirx.all(m.isnan(b), tirx.Not(m.isnan(a))))


@attrs.frozen(eq=False)
class _Items:
    """What is moved for each element: numbers, in the order of whose first one the items are.

    No bit below `lowest` is needed for that order where items come in the order of their positions.
    """

    numbers: Sequence[Callable[[Any], Any]]
    lowest: int
    position: Callable[[Sequence[Any]], Any]

    def at(self, place: Any) -> list[Any]:
        """Return the numbers of the element at a place of the row."""
        return [number(place) for number in self.numbers]

    def declare(self, count: int, name: str) -> list[tirx.Var]:
        """Declare task-private memory for `count` items."""
        return [task_buffer(count, _NUMBER, f"{name}{k}") for k in range(len(self.numbers))]


def _items(element: Callable[[Any], Any], dtype: str, *, descending: bool) -> _Items:
    """Return the items of a row."""
    width = 64 if dtype.endswith("64") else 32

    def key(at: Any) -> Any:
        bits = _ordered_bits(element(at), f"int{width}")
        return tirx.bitwise_xor(bits, tirx.const(-1, f"int{width}")) if descending else bits

    def both(at: Any) -> Any:
        upper = tirx.shift_left(m.cast(key(at), _NUMBER), _number(32))
        return tirx.bitwise_or(upper, m.cast(at, _NUMBER))

    if width == 64:
        return _Items([key, lambda at: m.cast(at, _NUMBER)], 0, lambda numbers: numbers[1])
    lower = _number(0xFFFFFFFF)
    return _Items([both], 32, lambda numbers: tirx.bitwise_and(numbers[0], lower))


def _ordered_bits(element: Any, dtype: str) -> Any:
    """Return a whole number in the order of the elements; both zeros are one, NaN is largest."""
    if not m.dtype_of(element).startswith("float"):
        return m.cast(element, dtype)
    width = int(dtype.removeprefix("int"))
    bits = tirx.reinterpret(dtype, element)
    zero, magnitude = tirx.const(0, dtype), tirx.const(2 ** (width - 1) - 1, dtype)
    sign = tirx.shift_right(bits, tirx.const(width - 1, dtype))
    ordered = tirx.bitwise_xor(bits, tirx.bitwise_and(sign, magnitude))
    is_zero = tirx.EQ(tirx.bitwise_and(bits, magnitude), zero)
    return tirx.Select(m.isnan(element), magnitude, tirx.Select(is_zero, zero, ordered))


def _number(value: int) -> Any:
    return tirx.const(value, _NUMBER)


def _load(buffers: Sequence[tirx.Var], at: Any) -> list[Any]:
    return [tirx.BufferLoad(buffer, [at]) for buffer in buffers]


def _store(buffers: Sequence[tirx.Var], numbers: Sequence[Any], at: Any) -> tirx.Stmt:
    pairs = zip(buffers, numbers, strict=True)
    return sequence([tirx.BufferStore(buffer, number, [at]) for buffer, number in pairs])


def _bound(
    numbers: Sequence[Any], body: Callable[[Sequence[tirx.Var]], Sequence[tirx.Stmt]]
) -> tirx.Stmt:
    """Emit `body(variables)`, where the variables have the values of the numbers."""
    item = [tirx.Var("item", _NUMBER) for _ in numbers]
    binds = [tirx.Bind(var, number) for var, number in zip(item, numbers, strict=True)]
    return tirx.SeqStmt([*binds, *body(item)])


@attrs.frozen(eq=False)
class _Merge:
    """A stable merge sort of one row's items, from the bottom up.

    The items go back and forth between two temporary rows; the places in the two runs being merged
    are in memory, where TVM's simplifier does not look.
    """

    items: _Items
    length: int
    places: tirx.Var = attrs.field(init=False, factory=lambda: task_buffer(2, _NUMBER, "places"))

    def ordered(self) -> RowOrder:
        """Emit the sort."""
        now, other = (self.items.declare(self.length, name) for name in ("order", "merged"))
        statements: list[tirx.Stmt] = [
            *map(tirx.AllocBuffer, (*now, *other, self.places)),
            serial(self.length, "at", lambda at: _store(now, self.items.at(at), at)),
        ]
        width = 1
        while width < self.length:
            statements.append(self._pass(now, other, width))
            now, other, width = other, now, 2 * width
        return RowOrder(statements, lambda k: self.items.position(_load(now, k)))

    def _pass(
        self, source: Sequence[tirx.Var], target: Sequence[tirx.Var], width: int
    ) -> tirx.Stmt:
        runs = -(-self.length // (2 * width))
        return serial(runs, "run", lambda run: self._merge(source, target, run * 2 * width, width))

    def _merge(
        self, source: Sequence[tirx.Var], target: Sequence[tirx.Var], low: Any, width: int
    ) -> tirx.Stmt:
        left, right = (tirx.BufferLoad(self.places, [k]) for k in (0, 1))
        middle = tirx.min(low + width, self.length)
        high = tirx.min(low + 2 * width, self.length)

        def at(place: Any) -> list[Any]:
            return _load(source, m.clamp(place, self.length))

        def take(item: Any) -> tirx.Stmt:
            is_earlier = at(right)[0] < at(left)[0]
            from_right = tirx.all(right < high, tirx.any(left >= middle, is_earlier))
            return tirx.IfThenElse(
                from_right, self._move(target, low + item, 1, at(right)),
                self._move(target, low + item, 0, at(left)),
            )  # fmt: skip

        return tirx.SeqStmt([
            tirx.BufferStore(self.places, m.cast(low, _NUMBER), [0]),
            tirx.BufferStore(self.places, m.cast(middle, _NUMBER), [1]),
            serial(high - low, "item", take),
        ])  # fmt: skip

    def _move(
        self, target: Sequence[tirx.Var], to: Any, run: int, numbers: Sequence[Any]
    ) -> tirx.Stmt:
        place = tirx.BufferLoad(self.places, [run])
        step = tirx.BufferStore(self.places, place + _number(1), [run])
        return tirx.SeqStmt([_store(target, numbers, to), step])


def _selected(items: _Items, length: int, count: int) -> RowOrder:
    """Insert each item that is smaller into a list of the smallest, which is in order."""
    first, end = items.declare(count, "first"), task_buffer(1, _NUMBER, "end")
    now = tirx.BufferLoad(end, [0])
    before = _load(first, tirx.max(now - _number(1), _number(0)))

    def insert(item: Sequence[Any]) -> tirx.Stmt:
        shift = tirx.SeqStmt([
            _store(first, before, now),
            tirx.BufferStore(end, now - _number(1), [0]),
        ])  # fmt: skip
        return tirx.SeqStmt([
            tirx.BufferStore(end, _number(count - 1), [0]),
            tirx.While(tirx.all(now > _number(0), _is_after(before, item)), shift),
            _store(first, item, now),
        ])  # fmt: skip

    def visit(at: Any) -> tirx.Stmt:
        last = _load(first, count - 1)
        return _bound(
            items.at(at), lambda item: [tirx.IfThenElse(_is_after(last, item), insert(item), None)]
        )

    none = [_number(2 ** (_BITS - 1) - 1), *(_number(-1) for _ in items.numbers[1:])]
    statements = [
        *map(tirx.AllocBuffer, (*first, end)),
        serial(count, "at", lambda at: _store(first, none, at)),
        serial(length, "at", visit),
    ]
    return RowOrder(statements, lambda k: items.position(_load(first, k)))


def _is_after(known: Sequence[Any], item: Sequence[Any]) -> Any:
    """Return whether an entry of the list is larger than an item, or there is none yet.

    A number that is the largest of all may be that of an element, but not if it has a position.
    """
    is_larger = known[0] > item[0]
    return is_larger if len(known) == 1 else tirx.any(is_larger, known[1] < _number(0))


@attrs.frozen(eq=False)
class _Counting:
    """A sort by a digit after the other, the lowest first, each by counting.

    Items go back and forth between the halves of a temporary row of twice the length. A digit that
    all of them share is passed over: whole numbers are often small.
    Source: Cormen et al., Introduction to Algorithms, radix sort.
    """

    items: _Items
    length: int
    rows: Sequence[tirx.Var] = attrs.field(init=False)
    counts: tirx.Var = attrs.field(init=False)
    running: tirx.Var = attrs.field(init=False, factory=lambda: task_buffer(1, _NUMBER, "running"))
    # Where the half begins that has the items.
    half: tirx.Var = attrs.field(init=False, factory=lambda: task_buffer(1, _NUMBER, "half"))

    @rows.default
    def _two_halves(self) -> Sequence[tirx.Var]:
        return self.items.declare(2 * self.length, "order")

    @counts.default
    def _all_counts(self) -> tirx.Var:
        return task_buffer(len(self.shifts) * _VALUES, _NUMBER, "counts")

    @property
    def shifts(self) -> range:
        """Return where each digit begins."""
        return range(self.items.lowest, _BITS, _DIGIT_BITS)

    def ordered(self) -> RowOrder:
        """Emit the sort."""
        zero = _number(0)
        clear = serial(
            len(self.shifts) * _VALUES, "at", lambda at: tirx.BufferStore(self.counts, zero, [at])
        )
        statements = [
            *map(tirx.AllocBuffer, (*self.rows, self.counts, self.running, self.half)),
            clear,
            serial(self.length, "at", self._count),
            tirx.BufferStore(self.half, zero, [0]),
            *(self._sorted_by(digit) for digit in range(len(self.shifts))),
        ]
        return RowOrder(statements, lambda k: self.items.position(self._item(k)))

    def _item(self, place: Any) -> list[Any]:
        return _load(self.rows, tirx.BufferLoad(self.half, [0]) + place)

    def _place(self, number: Any, digit: int) -> Any:
        """Return where a digit of a number is counted; the highest has its sign."""
        shift = self.shifts[digit]
        found = tirx.bitwise_and(tirx.shift_right(number, _number(shift)), _number(_VALUES - 1))
        if shift + _DIGIT_BITS == _BITS:
            found = tirx.bitwise_xor(found, _number(_VALUES // 2))
        return _number(digit * _VALUES) + found

    def _add_one(self, place: Any) -> tirx.Stmt:
        known = tirx.BufferLoad(self.counts, [place])
        return tirx.BufferStore(self.counts, known + _number(1), [place])

    def _count(self, at: Any) -> tirx.Stmt:
        def counted(item: Sequence[Any]) -> list[tirx.Stmt]:
            places = [self._place(item[0], digit) for digit in range(len(self.shifts))]
            return [_store(self.rows, item, at), *map(self._add_one, places)]

        return _bound(self.items.at(at), counted)

    def _sorted_by(self, digit: int) -> tirx.Stmt:
        of_first = tirx.BufferLoad(self.counts, [self._place(self._item(0)[0], digit)])
        moved = tirx.SeqStmt([*self._starts(digit), *self._moved(digit)])
        return tirx.IfThenElse(of_first < _number(self.length), moved, None)

    def _starts(self, digit: int) -> list[tirx.Stmt]:
        """Emit for each value of a digit where its items begin."""
        number, known = tirx.Var("number", _NUMBER), tirx.BufferLoad(self.running, [0])

        def start(value: Any) -> tirx.Stmt:
            place = digit * _VALUES + value
            return tirx.SeqStmt([
                tirx.Bind(number, tirx.BufferLoad(self.counts, [place])),
                tirx.BufferStore(self.counts, known, [place]),
                tirx.BufferStore(self.running, known + number, [0]),
            ])  # fmt: skip

        return [
            tirx.BufferStore(self.running, _number(0), [0]),
            serial(_VALUES, "value", start),
        ]

    def _moved(self, digit: int) -> list[tirx.Stmt]:
        """Emit the way of the items to the other half, in the order of a digit."""
        source, target, place = (tirx.Var(name, _NUMBER) for name in ("source", "target", "place"))

        def moved(item: Sequence[Any]) -> list[tirx.Stmt]:
            to = m.clamp(tirx.BufferLoad(self.counts, [place]), self.length)
            return [
                tirx.Bind(place, self._place(item[0], digit)),
                _store(self.rows, item, target + to),
                self._add_one(place),
            ]

        def move(at: Any) -> tirx.Stmt:
            return _bound(_load(self.rows, source + at), moved)

        return [
            tirx.Bind(source, tirx.BufferLoad(self.half, [0])),
            tirx.Bind(target, _number(self.length) - source),
            serial(self.length, "at", move),
            tirx.BufferStore(self.half, target, [0]),
        ]
