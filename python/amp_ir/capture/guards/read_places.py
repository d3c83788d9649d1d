# SPDX-License-Identifier: Apache-2.0
"""Places of the user's objects whose tensors a step reads at each call, whatever tensors they are.

Another tensor in the place of one that a step reads is another step, for it could be one of the
state's, or the other of two that were one. These may differ: what the call before has kept
(`self.hidden`), and what the user puts there for each call (`model.set_input(batch)`).
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Sequence
from typing import Any

import attrs
import torch

from amp_ir.capture.containers import flatten
from amp_ir.capture.dense_tensors import DenseReader
from amp_ir.capture.guards.observer import Observer
from amp_ir.capture.guards.places import CONTAINERS, Place, change_in_words
from amp_ir.capture.guards.users_objects import own_attributes
from amp_ir.capture.state import State
from amp_ir.host.held_values import each_held
from amp_ir.ir.memory_overlap import storage_address


@attrs.frozen(eq=False)
class ReadPlace:
    """A place whose tensors are inputs: those that are there at a call, of the same kinds."""

    place: Place
    # Of what was there at the capture: a container may change in its place.
    _kinds: Any = attrs.field(init=False)

    @_kinds.default
    def _kinds_before(self) -> Any:
        return kinds_of(self.place.before)

    def holds(self) -> bool:
        """Return whether the step is the same for what is in the place now."""
        return bool(kinds_of(self.place.now()) == self._kinds)

    def change(self) -> str:
        """Describe what is there now, and was not."""
        return f"{self.place.name()} {change_in_words(self.place.before, self.place.now())}"

    def readers(self) -> Iterator[tuple[int, PlaceReader]]:
        """Return the id of each tensor that was there, with what reads the one that is there."""
        for position, leaf in enumerate(flatten(self.place.before)[0]):
            if isinstance(leaf, torch.Tensor):
                yield id(leaf), PlaceReader(self.place, position)


@attrs.frozen(eq=False)
class PlaceReader:
    """A reader of the tensor that is in a place, by its position among the leaves there."""

    place: Place
    position: int

    @property
    def tensor(self) -> Any:
        """The tensor itself."""
        return flatten(self.place.now())[0][self.position]

    def __call__(self) -> torch.Tensor:
        """Return its values, dense and aligned."""
        return DenseReader(self.tensor)()


class ReadPlaces:
    """The readers of several places, by the ids of the tensors that were there.

    One that several places held is read in one of them. What is in the places now is none of the
    `state`, of which the step would read the values before it, where PyTorch may read later ones.
    """

    def __init__(self, places: Sequence[ReadPlace], state: State) -> None:
        self.places = places
        self._state = _memory_of(state) if places else set()
        readers: dict[int, list[PlaceReader]] = {}
        for key, reader in itertools.chain.from_iterable(one.readers() for one in places):
            readers.setdefault(key, []).append(reader)
        self.readers = {key: first for key, (first, *_) in readers.items()}
        self._shared = [one for one in readers.values() if len(one) > 1]

    def hold(self) -> bool:
        """Return whether places that held one tensor still do, and none is of the state."""
        if not all(one.tensor is first.tensor for first, *rest in self._shared for one in rest):
            return False
        tensors = (reader.tensor for reader in self.readers.values())
        return not any(storage_address(one) in self._state for one in tensors if one.numel())


def readable(places: Sequence[Place], state: State, observer: Observer) -> list[Place]:
    """Return the places whose tensors may be read at each call.

    Nothing else that the step reads holds them, they are none of the state's and need no gradient,
    and no Python code has read their values.
    """
    own = _memory_of(state)
    read = observer.read_values.keys()
    found = list(places)
    while True:
        held = _held_elsewhere(found, observer)

        def is_readable(tensor: torch.Tensor, held: set[int] = held) -> bool:
            address = storage_address(tensor) if tensor.numel() else None
            is_plain = not (tensor.requires_grad or tensor.is_complex())
            is_alone = address not in own and id(tensor) not in held
            return is_plain and is_alone and id(tensor) not in read

        kept = [one for one in found if all(map(is_readable, tensors_in(one.before)))]
        if len(kept) == len(found):
            return kept
        found = kept  # what another one holds, which is none, is held elsewhere


def _memory_of(state: State) -> set[Any]:
    """Return the addresses of the state's storages, but for what a step only reads from outside."""
    outside = set(map(id, state.outside))
    tensors = (one.tensor for one in state.tensors if id(one) not in outside)
    return {storage_address(one) for one in tensors if one.numel()}


def _held_elsewhere(places: Sequence[Place], observer: Observer) -> set[int]:
    """Return the ids of the tensors that are held by others than some places."""
    keys = {one.identity for one in places}
    holders = {id(one.holder) for one in places}
    within = {one for place in places for one in _ids_within(place.before)}
    held: set[int] = set()
    for place in observer.objects.places.values():
        is_within = id(place.holder) in within or id(place.before) in holders
        if own_attributes(place.before) is not None:  # an object that leads to a holder
            is_within = is_within or not holders.isdisjoint(_ids_within(place.before))
        if place.identity not in keys and not is_within:
            held.update(map(id, tensors_in(place.before)))
    for contents in observer.objects.contents.values():
        if id(contents.target) in within:
            continue
        by_key = contents.by_key() if isinstance(contents.target, (dict, list)) else {}
        own = {id(one) for key, one in by_key.items() if (id(contents.target), key) in keys}
        others = (one for key, one in by_key.items() if (id(contents.target), key) not in keys)
        for one in others if own else contents.before:
            held.update([id(one)] if isinstance(one, torch.Tensor) else [])
    return held


def places_named(names: frozenset[str], observer: Observer) -> list[Place]:
    """Return the places and entries of these names that held tensors."""
    found = [
        place
        for place in observer.objects.places.values()
        if place.is_loaded and tensors_in(place.before) and place.name() in names
    ]
    for contents in observer.objects.contents.values():
        if not isinstance(contents.target, (dict, list)):
            continue
        for key, before in contents.by_key().items():
            if isinstance(before, torch.Tensor):
                entry = contents.entry(key, before)
                found += [entry] if entry.name() in names else []
    return found


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a value, and of the containers in it."""
    if isinstance(value, torch.Tensor):
        return [value]
    if not isinstance(value, (tuple, *CONTAINERS)) and not hasattr(value, "__dict__"):
        return []
    return [one for one in flatten(value)[0] if isinstance(one, torch.Tensor)]


def kinds_of(value: Any, numbers: Container[int] = (), *, is_read: bool = True) -> Any:
    """Return what is equal for values whose tensors and `numbers`, by position, differ alone.

    Where it `is_read`, tensors are of equal shapes.
    """
    leaves, spec = flatten(value)
    kinds: list[Any] = []
    for position, one in enumerate(leaves):
        if isinstance(one, torch.Tensor):
            layout = (one.shape, one.stride(), one.requires_grad) if is_read else one.dim()
            kinds.append((layout, one.dtype, one.device))
        elif position in numbers and isinstance(one, (int, float)):
            kinds.append(float)
        else:
            kinds.append((type(one), one))
    return spec, kinds


def _ids_within(value: Any) -> Iterator[int]:
    """Return the ids of the containers and objects in a value, and of their attributes' dicts."""
    try:
        for one in each_held(value, lambda one: isinstance(one, (torch.Tensor, torch.nn.Module))):
            if not isinstance(one, (torch.Tensor, torch.nn.Module, type)):
                yield id(one)
                if hasattr(one, "__dict__"):
                    yield id(vars(one))
    except OverflowError:
        return
