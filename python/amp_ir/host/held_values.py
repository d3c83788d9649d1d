# SPDX-License-Identifier: Apache-2.0
"""What an object holds: entries, attributes, and what a function reads when it is called."""

from __future__ import annotations

import array
import collections
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import attrs

# Read by position; the entries of the last two are numbers that nothing else can stand for.
SEQUENCES = (list, collections.deque, bytearray, array.array)
# A bound method of a program's main object reaches all of its data.
_MOST = 10_000
_FUNCTIONS = (
    types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial,
)  # fmt: skip


@attrs.frozen
class Again:
    """What a walk returns for a value that it has looked into: the number of that value."""

    number: int


def each_held(value: Any, is_end: Callable[[Any], bool]) -> Iterator[Any]:
    """Return a value and what it reaches in a fixed order, but nothing that an end holds.

    A value that is reached again is an `Again`, so that two values of which all parts are equal
    have the same structure.

    Raises:
        OverflowError: it reaches thousands of values.
    """
    waiting, count = [value], 0
    seen: dict[int, tuple[Again, Any]] = {}  # with the value, so that no other takes its id
    while waiting:
        one = waiting.pop()
        count += 1
        if count > _MOST:
            raise OverflowError
        if id(one) in seen:
            yield seen[id(one)][0]
            continue
        yield one
        if not is_end(one):
            seen[id(one)] = Again(len(seen)), one
            waiting += reversed(held_by(one) or ())


def held_by(value: Any) -> list[Any] | None:
    """Return what an object holds; None where that cannot be seen, as in a generator."""
    if isinstance(value, (dict, types.MappingProxyType)):
        return [part for pair in value.items() for part in pair]
    if isinstance(value, (*SEQUENCES, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, _FUNCTIONS):
        return _held_by_function(value)
    slots = [name for owner in type(value).__mro__ for name in slots_of(owner)]
    own = getattr(value, "__dict__", None)
    if own is None and not slots:
        return None
    return [*(own or {}).values(), *(getattr(value, one) for one in slots if hasattr(value, one))]


def _held_by_function(value: Any) -> list[Any]:
    if isinstance(value, types.BuiltinFunctionType):
        return [value.__self__]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values(), *vars(value).values()]
    cells = [one.cell_contents for one in value.__closure__ or () if _is_filled(one)]
    defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    return [*cells, *defaults, *vars(value).values()]


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def slots_of(owner: type) -> list[str]:
    """Return the attributes that a class itself keeps in slots."""
    slots = vars(owner).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else slots
    return [name for name in names if name not in ("__dict__", "__weakref__")]
