# SPDX-License-Identifier: Apache-2.0
"""Places in the user's Python objects that a step may read: their location and contents."""

from __future__ import annotations

import array
import collections
import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import attrs
import numpy
import torch

from amp_ir.capture.batch import PLAIN
from amp_ir.capture.patches.registered_functions import REPLACES
from amp_ir.host.held_values import SEQUENCES
from amp_ir.ir.location import Location

CONTAINERS = (*SEQUENCES, dict, set)
_COMPARED_BY_VALUE = (*PLAIN, numpy.generic, numpy.dtype, range)
_SHOWN = 60


class _Absent:
    """The type of ABSENT, which stands for the value of a place that has none."""

    def __repr__(self) -> str:
        """Return "absent"."""
        return "absent"


ABSENT = _Absent()
_NOTHING = object()


@attrs.define(eq=False)
class Place:
    """One entry of a dictionary, attribute of an object or content of a closure's cell.

    `holder` is the dictionary, object or cell; `kind` is "entry", "attribute", "cell" or, for an
    attribute of a class itself, without those of its bases, "own".
    `before` is the value when the step first reached the place. `is_loaded` says that the step may
    have read it before it wrote it, and `line` is (file, line) of a store, if any. `stand_in` is
    what the capture has put there for `before`, and which counts as that; `symbol` is what it has
    put there for a number.
    """

    holder: Any
    kind: str
    key: Any
    name: Callable[[], str]
    before: Any
    is_loaded: bool = False
    line: tuple[str, int] = ("", 0)
    stand_in: Any = _NOTHING
    symbol: Any = _NOTHING

    @property
    def identity(self) -> tuple[int, Any]:
        """Return what is equal for the same place in another trace."""
        return id(self.holder), self.key

    def now(self) -> Any:
        """Return the current value; ABSENT for none, and of a registered function the user's."""
        value = self.held()
        if value is self.stand_in:
            return self.before
        function = value.__func__ if type(value) is staticmethod else value
        if type(function) is not FunctionType or REPLACES not in vars(function):
            return value
        users = vars(function)[REPLACES]
        return getattr(users, "__func__", users) if self.kind == "attribute" else users

    def held(self) -> Any:
        """Return what is there now; ABSENT for nothing."""
        if self.kind == "entry":
            if isinstance(self.holder, SEQUENCES):
                return self.holder[self.key] if self.key < len(self.holder) else ABSENT
            return self.holder.get(self.key, ABSENT)
        if self.kind == "cell":
            try:
                return self.holder.cell_contents
            except ValueError:
                return ABSENT
        if self.kind == "own":
            return vars(self.holder).get(self.key, ABSENT)
        return getattr(self.holder, self.key, ABSENT)

    def holds(self) -> bool:
        """Return whether a graph that saw the value before the step is valid now."""
        return is_same(self.now(), self.before)

    def put_back(self) -> None:
        """Store the value that was there before the step."""
        self.put(self.before)
        self.stand_in = _NOTHING

    def put_stand_in(self, value: Any) -> None:
        """Store what stands for the value of before; a frozen object keeps that."""
        with contextlib.suppress(AttributeError, TypeError):
            self.put(value)
            self.stand_in = value

    def put(self, value: Any) -> None:
        """Store `value`; ABSENT removes the entry."""
        if self.kind == "cell":
            if value is ABSENT:
                del self.holder.cell_contents
            else:
                self.holder.cell_contents = value
        elif self.kind in ("attribute", "own"):
            if value is ABSENT:
                delattr(self.holder, self.key)
            else:
                setattr(self.holder, self.key, value)
        elif value is ABSENT:
            del self.holder[self.key]
        else:
            self.holder[self.key] = value


@attrs.define(eq=False)
class Contents:
    """A list, deque, array, dictionary or set as a whole: its length, order and items."""

    target: Any
    name: Callable[[], str]
    before: tuple[Any, ...]
    is_loaded: bool = True
    line: tuple[str, int] = ("", 0)
    # What the capture has put there, with what it stands for, by id.
    _stand_ins: dict[int, tuple[Any, Any]] = attrs.Factory(dict)

    def now(self) -> tuple[Any, ...]:
        """Return the current items, flat; of stand-ins what they stand for."""
        items = flat(self.target)
        if not self._stand_ins:
            return items
        return tuple(map(self.before_stand_in, items))

    def put_stand_ins(self, of: Callable[[Any], Any]) -> bool:
        """Store what stands for the items, as `of` returns it; return whether that differs."""
        items = tuple(map(of, self.before))
        pairs = zip(items, self.before, strict=True)
        self._stand_ins = {id(one): (one, item) for one, item in pairs if one is not item}
        if self._stand_ins:
            self.put(items)
        return bool(self._stand_ins)

    def before_stand_in(self, item: Any) -> Any:
        """Return what an item stands for: that itself, if the capture has not put it there."""
        return self._stand_ins.get(id(item), (item, item))[1]

    def by_key(self) -> dict[Any, Any]:
        """Return the items that were there before the step, by their keys or positions."""
        if isinstance(self.target, dict):
            return dict(zip(self.before[::2], self.before[1::2], strict=True))
        return dict(enumerate(self.before))

    def entry(self, key: Any, before: Any) -> Place:
        """Return the place of an entry of a dictionary, or of an item at a position."""

        def name() -> str:
            word = "entry" if isinstance(self.target, dict) else "item"
            return f"{word} {in_words(key)} of {self.name()}"

        return Place(self.target, "entry", key, name, before, is_loaded=True, line=self.line)

    def holds(self) -> bool:
        """Return whether the items are the same objects, or equal plain values."""
        now = self.now()
        return len(now) == len(self.before) and all(map(is_same, now, self.before))

    def put_back(self) -> None:
        """Store the items that were there before the step."""
        self.put(self.before)
        self._stand_ins = {}

    def put(self, items: tuple[Any, ...]) -> None:
        """Store these items, as `now` returns them."""
        target = self.target
        if isinstance(target, (list, bytearray)):
            target[:] = items
            return
        if isinstance(target, array.array):
            target[:] = array.array(target.typecode, items)
            return
        target.clear()
        if isinstance(target, dict):
            target.update(zip(items[::2], items[1::2], strict=True))
        elif isinstance(target, collections.deque):
            target.extend(items)
        else:
            target.update(items)


def flat(container: Any) -> tuple[Any, ...]:
    """Return the items of a sequence or set; keys and values of a dictionary in turn."""
    if isinstance(container, dict):
        return tuple(part for pair in container.items() for part in pair)
    return tuple(container)


def is_plain(value: object) -> bool:
    """Return whether a value is compared by value rather than by identity."""
    if isinstance(value, (tuple, frozenset)) and not hasattr(value, "_fields"):
        return all(map(is_plain, value))
    return isinstance(value, _COMPARED_BY_VALUE)


def is_number(value: object) -> bool:
    """Return whether a value can become an input that is read at each call."""
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def is_same(now: Any, before: Any) -> bool:
    """Return whether a graph that saw `before` is valid for `now`."""
    if now is before:
        return True
    if type(now) is not type(before) or not is_plain(before):
        return False
    if isinstance(now, tuple):
        return len(now) == len(before) and all(map(is_same, now, before))
    if isinstance(now, (float, numpy.floating)):
        # Distinguishes 0.0 from -0.0, and treats NaN as equal to NaN.
        return repr(now) == repr(before)
    return bool(now == before)


def in_words(value: object) -> str:
    """Return a value for a message: itself if it is plain and short, else its description."""
    if value is ABSENT:
        return "absent"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if is_plain(value) and len(repr(value)) <= _SHOWN:
        return repr(value)
    if isinstance(value, FunctionType):
        return f"the function {describe_function(value)}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    article = "an" if type(value).__name__[0] in "AEIOUaeiou" else "a"
    return f"{article} {type(value).__name__}"


def change_in_words(before: object, now: object) -> str:
    """Describe the old and the new value."""
    was, is_now = in_words(before), in_words(now)
    if was == is_now:
        return f"was {was} and is another one"
    return f"was {was} and is {is_now}"


def describe_function(function: FunctionType) -> str:
    """Return a function's name and location: `step (train.py:12)`."""
    code = function.__code__
    name = function.__qualname__.rsplit("<locals>.", 1)[-1]
    return f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def cell_value(cell: CellType) -> Any:
    """Return the content of a cell; ABSENT for an empty one."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def line_of(place: Place, contents: Mapping[int, Contents]) -> tuple[str, int]:
    """Return the line of a store to a place, or to the container that it is an entry of."""
    held = contents.get(id(place.holder))
    return place.line if place.line[1] or held is None else held.line


def location_at(line: tuple[str, int]) -> Location:
    """Return the location of (file, line); of line 0 one that says nothing."""
    return Location(file=line[0], line=line[1]) if line[1] else Location()
