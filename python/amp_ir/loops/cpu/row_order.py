# SPDX-License-Identifier: Apache-2.0
"""The positions of a row's elements in order on a CPU: all of them, or the first few.

An element of at most 32 bits and its position are one number of 64, whose order is the one that is
asked for: equal elements are in the order of their positions. No position is then followed to an
element. Wider elements are compared where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
from tvm import tirx
from tvm.tirx import For, ForKind

from amp_ir.loops import math as m
from amp_ir.loops.codegen.kernel_buffers import task_buffer

# As wide as an address: from two neighbours of 32 bits, stored at once, LLVM may take both for the
# address of an element (seen for rows of four with AVX2).
_POSITION = "int64"
# So few are inserted into a list of the first ones, of rows so many times as long.
_MOST_SELECTED, _LEAST_RATIO = 64, 4
# Rows from which on digits are counted; to begin with 1024 counts takes longer than to merge.
_LEAST_COUNTED = 256
_DIGIT_BITS, _DIGITS = 8, 4


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
    if dtype in ("float32", "int32"):
        packed = _Packed(length, element, descending)
        if count <= _MOST_SELECTED and count * _LEAST_RATIO <= length:
            return packed.selected(count)
        return packed.counted() if length >= _LEAST_COUNTED else packed.merged()

    def precedes(a: Any, b: Any) -> Any:
        return comes_before(element(a), element(b), descending=descending)

    statements, found = _Merge(length, lambda at: m.cast(at, _POSITION), precedes).statements()
    return RowOrder(statements, lambda k: tirx.BufferLoad(found, [k]))


def comes_before(a: Any, b: Any, *, descending: bool) -> Any:
    """Return whether a strictly precedes b; NaN is larger than everything, as in PyTorch."""
    if descending:
        a, b = b, a
    return tirx.any(a < b, tirx.all(m.isnan(b), tirx.Not(m.isnan(a))))


@attrs.frozen(eq=False)
class _Merge:
    """A stable merge sort of one row's items, from the bottom up.

    The items go back and forth between two temporary rows; the places in the two runs being merged
    are in memory, where TVM's simplifier does not look.
    """

    length: int
    item: Callable[[Any], Any]
    precedes: Callable[[Any, Any], Any]
    rows: tuple[tirx.Var, tirx.Var] = attrs.field(init=False)
    places: tirx.Var = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        made = [task_buffer(self.length, _POSITION, name) for name in ("order", "merged")]
        object.__setattr__(self, "rows", tuple(made))
        object.__setattr__(self, "places", task_buffer(2, _POSITION, "places"))

    def statements(self) -> tuple[list[tirx.Stmt], tirx.Var]:
        """Emit the sort; return it and the temporary row that holds the items at its end."""
        now, other = self.rows
        statements: list[tirx.Stmt] = [
            tirx.AllocBuffer(now),
            tirx.AllocBuffer(other),
            tirx.AllocBuffer(self.places),
            serial(self.length, "at", lambda at: tirx.BufferStore(now, self.item(at), [at])),
        ]
        width = 1
        while width < self.length:
            statements.append(self._pass(now, other, width))
            now, other, width = other, now, 2 * width
        return statements, now

    def _pass(self, source: tirx.Var, target: tirx.Var, width: int) -> tirx.Stmt:
        runs = -(-self.length // (2 * width))
        return serial(runs, "run", lambda run: self._merge(source, target, run * 2 * width, width))

    def _merge(self, source: tirx.Var, target: tirx.Var, low: Any, width: int) -> tirx.Stmt:
        left, right = (tirx.BufferLoad(self.places, [k]) for k in (0, 1))
        middle = tirx.min(low + width, self.length)
        high = tirx.min(low + 2 * width, self.length)

        def at(place: Any) -> Any:
            return tirx.BufferLoad(source, [m.clamp(place, self.length)])

        def take(item: Any) -> tirx.Stmt:
            # Not by negation: TVM takes the contrary of `a < b` for `b <= a`, which is false for
            # NaN too.
            is_earlier = self.precedes(at(right), at(left))
            from_right = tirx.all(right < high, tirx.any(left >= middle, is_earlier))
            return tirx.IfThenElse(
                from_right, self._move(target, low + item, 1, at(right)),
                self._move(target, low + item, 0, at(left)),
            )  # fmt: skip

        return tirx.SeqStmt([
            tirx.BufferStore(self.places, m.cast(low, _POSITION), [0]),
            tirx.BufferStore(self.places, m.cast(middle, _POSITION), [1]),
            serial(high - low, "item", take),
        ])  # fmt: skip

    def _move(self, target: tirx.Var, to: Any, run: int, item: Any) -> tirx.Stmt:
        place = tirx.BufferLoad(self.places, [run])
        step = tirx.BufferStore(self.places, place + tirx.const(1, _POSITION), [run])
        return tirx.SeqStmt([tirx.BufferStore(target, item, [to]), step])


@attrs.frozen(eq=False)
class _Packed:
    """A row of elements of 32 bits as items: the element in the upper half, its position below."""

    length: int
    element: Callable[[Any], Any]
    descending: bool

    def merged(self) -> RowOrder:
        """Order the items by merging."""
        merge = _Merge(self.length, self.item, lambda a, b: a < b)
        statements, found = merge.statements()
        return RowOrder(statements, lambda k: _position(tirx.BufferLoad(found, [k])))

    def selected(self, count: int) -> RowOrder:
        """Insert each item that is smaller into a list of the smallest, which is in order."""
        first, end = task_buffer(count, _POSITION, "first"), task_buffer(1, _POSITION, "end")
        item = tirx.Var("item", _POSITION)
        zero, one = (tirx.const(k, _POSITION) for k in (0, 1))
        now = tirx.BufferLoad(end, [0])
        before = tirx.BufferLoad(first, [tirx.max(now - one, zero)])
        largest = tirx.const(2**63 - 1, _POSITION)

        def insert() -> tirx.Stmt:
            shift = tirx.SeqStmt([
                tirx.BufferStore(first, before, [now]),
                tirx.BufferStore(end, now - one, [0]),
            ])  # fmt: skip
            return tirx.SeqStmt([
                tirx.BufferStore(end, tirx.const(count - 1, _POSITION), [0]),
                tirx.While(tirx.all(now > zero, before > item), shift),
                tirx.BufferStore(first, item, [now]),
            ])  # fmt: skip

        def visit(at: Any) -> tirx.Stmt:
            last = tirx.BufferLoad(first, [count - 1])
            return tirx.SeqStmt([
                tirx.Bind(item, self.item(at)),
                tirx.IfThenElse(item < last, insert(), None),
            ])  # fmt: skip

        statements = [
            tirx.AllocBuffer(first),
            tirx.AllocBuffer(end),
            serial(count, "at", lambda at: tirx.BufferStore(first, largest, [at])),
            serial(self.length, "at", visit),
        ]
        return RowOrder(statements, lambda k: _position(tirx.BufferLoad(first, [k])))

    def counted(self) -> RowOrder:
        """Order the items by a digit after the other, the lowest first, each by counting.

        Source: Cormen et al., Introduction to Algorithms, radix sort.
        """
        now, other = (task_buffer(self.length, _POSITION, name) for name in ("order", "sorted"))
        values = 1 << _DIGIT_BITS
        counts = task_buffer(_DIGITS * values, _POSITION, "counts")
        running = task_buffer(1, _POSITION, "running")
        zero, one = (tirx.const(k, _POSITION) for k in (0, 1))
        item = tirx.Var("item", _POSITION)

        def add_one(place: Any) -> tirx.Stmt:
            return tirx.BufferStore(counts, tirx.BufferLoad(counts, [place]) + one, [place])

        def count(at: Any) -> tirx.Stmt:
            places = [digit * values + _digit(item, digit) for digit in range(_DIGITS)]
            return tirx.SeqStmt([
                tirx.Bind(item, self.item(at)),
                tirx.BufferStore(now, item, [at]),
                *map(add_one, places),
            ])  # fmt: skip

        def start(place: Any) -> tirx.Stmt:
            number, known = tirx.Var("number", _POSITION), tirx.BufferLoad(running, [0])
            return tirx.SeqStmt([
                tirx.Bind(number, tirx.BufferLoad(counts, [place])),
                tirx.BufferStore(counts, known, [place]),
                tirx.BufferStore(running, known + number, [0]),
            ])  # fmt: skip

        def starts(digit: int) -> tirx.Stmt:
            return tirx.SeqStmt([
                tirx.BufferStore(running, zero, [0]),
                serial(values, "value", lambda value: start(digit * values + value)),
            ])  # fmt: skip

        def distribute(digit: int, source: tirx.Var, target: tirx.Var) -> tirx.Stmt:
            moved, place = tirx.Var("moved", _POSITION), tirx.Var("place", _POSITION)

            def move(at: Any) -> tirx.Stmt:
                to = tirx.BufferLoad(counts, [place])
                return tirx.SeqStmt([
                    tirx.Bind(moved, tirx.BufferLoad(source, [at])),
                    tirx.Bind(place, digit * values + _digit(moved, digit)),
                    tirx.BufferStore(target, moved, [m.clamp(to, self.length)]),
                    add_one(place),
                ])  # fmt: skip

            return serial(self.length, "at", move)

        clear = serial(_DIGITS * values, "at", lambda at: tirx.BufferStore(counts, zero, [at]))
        buffers = [tirx.AllocBuffer(buffer) for buffer in (now, other, counts, running)]
        statements = [*buffers, clear, serial(self.length, "at", count)]
        statements += [starts(digit) for digit in range(_DIGITS)]
        source, target = now, other
        for digit in range(_DIGITS):
            statements.append(distribute(digit, source, target))
            source, target = target, source
        return RowOrder(statements, lambda k: _position(tirx.BufferLoad(source, [k])))

    def item(self, at: Any) -> Any:
        """Return the number of an element and its position, in whose order elements are wanted."""
        key = _ordered_bits(self.element(at))
        if self.descending:
            key = tirx.bitwise_xor(key, tirx.const(-1, "int32"))
        upper = tirx.shift_left(m.cast(key, _POSITION), tirx.const(32, _POSITION))
        return tirx.bitwise_or(upper, m.cast(at, _POSITION))


def _ordered_bits(element: Any) -> Any:
    """Return an int32 in the order of the elements: both zeros are one, and NaN is the largest."""
    if m.dtype_of(element) == "int32":
        return element
    bits = tirx.reinterpret("int32", element)
    magnitude = tirx.const(0x7FFFFFFF, "int32")
    negative = tirx.bitwise_and(tirx.shift_right(bits, tirx.const(31, "int32")), magnitude)
    ordered = tirx.bitwise_xor(bits, negative)
    is_zero = tirx.EQ(tirx.bitwise_and(bits, magnitude), tirx.const(0, "int32"))
    number = tirx.Select(is_zero, tirx.const(0, "int32"), ordered)
    return tirx.Select(m.isnan(element), magnitude, number)


def _digit(item: Any, digit: int) -> Any:
    """Return a digit of an item's upper half, which is signed."""
    shift = 32 + digit * _DIGIT_BITS
    lowest = tirx.shift_right(item, tirx.const(shift, _POSITION))
    found = tirx.bitwise_and(lowest, tirx.const((1 << _DIGIT_BITS) - 1, _POSITION))
    if digit < _DIGITS - 1:
        return found
    return tirx.bitwise_xor(found, tirx.const(1 << (_DIGIT_BITS - 1), _POSITION))


def _position(item: Any) -> Any:
    return tirx.bitwise_and(item, tirx.const(0xFFFFFFFF, _POSITION))
