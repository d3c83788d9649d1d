# SPDX-License-Identifier: Apache-2.0
"""Guards on the Python objects that a step read: compared at every call.

The fast path asks whether anything was written to the dictionaries (watch.py); only then are the
guards compared. `changes` describes what differs.
"""

from __future__ import annotations

import array
import collections
import operator
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy
import torch

from amp_ir.capture.guards.observer import Observer
from amp_ir.capture.guards.places import (
    ABSENT,
    Contents,
    Place,
    change_in_words,
    flat,
    in_words,
    is_number,
    is_same,
)
from amp_ir.capture.guards.read_places import tensors_in

# Numbers of a tensor that are told one by one.
_MOST_SHOWN = 8


@attrs.frozen
class Tier:
    """Guards that are compared together.

    `holds` is fast, and may be False where nothing differs; `changes` describes what does, and
    `refresh` makes `holds` True again after it has found nothing.
    """

    holds: Callable[[], bool]
    changes: Callable[[], Iterator[str]]
    refresh: Callable[[], None] = lambda: None


class GuardedObjects:
    """Guards on what the observer saw: `followed` names numbers that are inputs instead.

    `ignored` are the holder's id and the key of places that other guards are on.
    """

    def __init__(
        self,
        observer: Observer,
        followed: frozenset[str],
        fixed: frozenset[str],
        ignored: frozenset[tuple[int, Any]] = frozenset(),
    ) -> None:
        self._fixed = fixed
        places = [place for place in observer.objects.places.values() if place.is_loaded]
        places = [one for one in places if one.identity not in ignored]
        self.followed = {one.name(): one for one in places if one.name() in followed}
        self._contents = list(observer.objects.contents.values())
        whole = {id(contents.target) for contents in self._contents}
        places = [one for one in places if one.name() not in followed]
        self._entries: dict[int, list[Place]] = {}
        self._others: list[Place] = []
        for place in places:
            if isinstance(place.holder, dict) and "__builtins__" not in place.holder:
                self._entries.setdefault(id(place.holder), []).append(place)
            elif id(place.holder) not in whole:
                self._others.append(place)
        self._dictionaries = [c for c in self._contents if isinstance(c.target, dict)]
        self._lists = [c for c in self._contents if not isinstance(c.target, dict)]
        self._ignored = {p.identity for p in self.followed.values()} | ignored
        self._arrays = list(observer.objects.arrays.values())
        self._read_values = list(observer.read_values.values())
        self._instances = [one for one, _ in observer.objects.instances.values()]
        self._names = [name for _, name in observer.objects.instances.values()]
        self._classes = list(observer.objects.classes.values())
        holders = [holder[0].holder for holder in self._entries.values()]
        self.dictionaries = [*holders, *(c.target for c in self._dictionaries)]

    def hold(self) -> bool:
        """Return whether nothing differs, given that nothing was written to `dictionaries`."""
        return (
            not self._arrays
            and all(_has_same_bits(tensor, value) for tensor, value, _ in self._read_values)
            and all(type(p.now()) is type(p.before) for p in self.followed.values())
            and all(place.now() is place.before for place in self._others)
            and all(_is_untouched(contents) for contents in self._lists)
            # Another class writes to no dictionary.
            and list(map(type, self._instances)) == self._classes
        )

    def changes(self) -> Iterator[str]:
        """Describe what differs."""
        yield from self.changed_kinds()
        for place in self._changed_places():
            yield f"{place.name()} {change_in_words(place.before, place.now())}"
        for contents in self._contents:
            yield from self._changed_contents(contents)
        for one, kind, name in zip(self._instances, self._classes, self._names, strict=True):
            if type(one) is not kind:
                yield f"the class of {name()} {change_in_words(kind, type(one))}"
        for now, before, name_of in self._arrays:
            if not numpy.array_equal(now, before, equal_nan=now.dtype.kind in "fc"):
                yield f"the array in {name_of()} has other values"
        for tensor, value, name_of in self._read_values:
            if not _has_same_bits(tensor, value):
                yield f"the value of {name_of()} {_change_of_value(value, tensor)}"

    def changed_kinds(self) -> Iterator[str]:
        """Describe the numbers that are inputs which are of another type now."""
        for name, place in self.followed.items():
            if type(place.now()) is not type(place.before):
                yield f"{name} {change_in_words(place.before, place.now())}"

    def changed_numbers(self) -> tuple[str, ...]:
        """Return the numbers that could be inputs and have another value now."""
        return tuple(
            name
            for place in self._changed_places()
            if is_number(place.before)
            and type(place.now()) is type(place.before)
            and is_number(place.now())
            and (name := place.name()) not in self._fixed
        )

    def changed_tensors(self) -> tuple[str, ...]:
        """Return the names of places and entries that hold other tensors now."""
        places = [
            one
            for one in self._changed_places()
            if tensors_in(one.before) and type(one.now()) is type(one.before)
        ]
        entries = [
            contents.entry(key, before)
            for contents in self._contents
            if isinstance(contents.target, (dict, list))
            for key, before in contents.by_key().items()
            if isinstance(before, torch.Tensor)
        ]
        changed = [
            one
            for one in entries
            if isinstance(now := one.now(), torch.Tensor) and now is not one.before
        ]
        return tuple(one.name() for one in (*places, *changed))

    def _changed_places(self) -> Iterator[Place]:
        for places in self._entries.values():
            yield from (one for one in places if not is_same(one.now(), one.before))
        for place in self._others:
            if not is_same(place.now(), place.before):
                yield place
        # Items of lists; the guards of contents report that something differs.
        for contents in self._lists:
            if isinstance(contents.target, (list, collections.deque)) and not _is_untouched(
                contents
            ):
                for key, before in enumerate(contents.before):
                    if (id(contents.target), key) in self._ignored:
                        continue
                    now = contents.target[key] if key < len(contents.target) else ABSENT
                    if not is_same(now, before):
                        yield contents.entry(key, before)

    def _changed_contents(self, contents: Contents) -> Iterator[str]:
        target = contents.target
        if isinstance(target, dict):
            if list(target) != list(contents.before[::2]):
                yield f"{contents.name()} has other keys"
                return
            values = zip(target, target.values(), contents.before[1::2], strict=True)
            for key, now, before in values:
                at = (id(target), key)
                if at not in self._ignored and not is_same(now, before):
                    entry = f"entry {in_words(key)} of {contents.name()}"
                    yield f"{entry} {change_in_words(before, now)}"
        elif len(target) != len(contents.before):
            now_count, count = len(target), len(contents.before)
            yield f"{contents.name()} had {count} items and has {now_count}"
        elif isinstance(target, set) and target != set(contents.before):
            yield f"{contents.name()} has other items: {in_words(frozenset(target))}"
        elif isinstance(target, (bytearray, array.array)) and not contents.holds():
            yield f"{contents.name()} has other items"


def _is_untouched(contents: Contents) -> bool:
    now = flat(contents.target)
    return len(now) == len(contents.before) and all(map(operator.is_, now, contents.before))


def _has_same_bits(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits; equal NaNs do, 0.0 and -0.0 do not."""
    if tensor.shape != value.shape or tensor.dtype != value.dtype or tensor.device != value.device:
        return False
    one, other = (
        (torch.view_as_real(each) if each.is_complex() else each).contiguous().reshape(-1)
        for each in (tensor.detach().resolve_conj().resolve_neg(), value)
    )
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _change_of_value(before: torch.Tensor, now: torch.Tensor) -> str:
    if before.numel() > _MOST_SHOWN or now.numel() > _MOST_SHOWN:
        return "was read, and has changed"
    return change_in_words(before.tolist(), now.tolist())
