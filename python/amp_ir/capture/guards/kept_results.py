# SPDX-License-Identifier: Apache-2.0
"""What each call of a step keeps in the user's objects, and guards on what is there before it."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator
from typing import Any

import attrs
import torch

from amp_ir.capture.batch import Results
from amp_ir.capture.containers import flatten
from amp_ir.capture.dense_tensors import DenseReader
from amp_ir.capture.guards.places import Place, change_in_words, is_same


@attrs.frozen(eq=False)
class KeptResult:
    """What each call puts in a place, built of the tensors of its batch and its results.

    `accepted` are an example of what a call puts there, and what was there before the first one,
    for which the step is the same; it is empty where the step reads nothing there. `is_carried`
    says that the step computes with what it finds there, whatever tensors of the first one's kinds.
    """

    place: Place
    value: Results
    in_words: str
    is_read: bool
    accepted: tuple[Any, ...] = ()
    is_carried: bool = False

    @property
    def key(self) -> tuple[int, Any]:
        """Return what is equal for the same place in another trace."""
        return id(self.place.holder), self.place.key

    @property
    def is_guarded(self) -> bool:
        """Whether the guards of other objects hold for what was there before alone."""
        return self.place.is_loaded and not self.is_read

    def install(self, tensors: list[torch.Tensor]) -> None:
        """Put the value of this call in its place."""
        self.place.put(self.value.build(tensors))

    def holds(self) -> bool:
        """Return whether the step is the same for what is in the place now."""
        if self.is_carried:
            before = self.place.before
            return _kinds(self.place.now(), ()) == _kinds(before, ())
        if not self.accepted:
            return True
        example, before = self.accepted
        now = self.place.now()
        if is_same(now, before):
            return True
        # The step was the same for two shapes, so that it does not ask for the shape.
        any_shape = self._kinds(example, any_shape=True) == self._kinds(before, any_shape=True)
        return bool(
            self._kinds(now, any_shape=any_shape) == self._kinds(example, any_shape=any_shape)
        )

    def _kinds(self, value: Any, *, any_shape: bool) -> Any:
        return _kinds(value, self.value.numbers, any_shape=any_shape)

    def change(self) -> str:
        """Describe what is there now, and was not."""
        before = self.place.before if self.is_carried else self.accepted[-1]
        return f"{self.place.name()} {change_in_words(before, self.place.now())}"

    @property
    def holds_tensors(self) -> bool:
        """Return whether tensors were there before the step."""
        return bool(tensors_in(self.place.before))

    def readers(self) -> Iterator[tuple[int, KeptReader]]:
        """Return the id of each tensor that was there, with what reads the one that is there."""
        if self.is_carried:
            for position, leaf in enumerate(flatten(self.place.before)[0]):
                if isinstance(leaf, torch.Tensor):
                    yield id(leaf), KeptReader(self.place, position)


@attrs.frozen(eq=False)
class KeptReader:
    """A reader of a tensor that the call before has kept, by its position among the leaves."""

    place: Place
    position: int

    @property
    def tensor(self) -> Any:
        """The tensor itself."""
        return flatten(self.place.now())[0][self.position]

    def __call__(self) -> torch.Tensor:
        """Return its values, dense and aligned."""
        return DenseReader(self.tensor)()


class CarriedTensors:
    """What reads, at each call, the tensors that the call before has kept, by their ids before.

    One that several places held is read in one of them.
    """

    def __init__(self, kept: Iterable[KeptResult]) -> None:
        readers: dict[int, list[KeptReader]] = {}
        for key, reader in itertools.chain.from_iterable(one.readers() for one in kept):
            readers.setdefault(key, []).append(reader)
        self.readers = {key: first for key, (first, *_) in readers.items()}
        self._shared = [one for one in readers.values() if len(one) > 1]

    def hold(self) -> bool:
        """Return whether places that held one tensor still do."""
        return all(one.tensor is first.tensor for first, *rest in self._shared for one in rest)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a value, and of the containers in it."""
    return [one for one in flatten(value)[0] if isinstance(one, torch.Tensor)]


def _kinds(value: Any, numbers: Container[int], *, any_shape: bool = False) -> Any:
    """Return what is equal for values whose tensors and `numbers`, by position, differ alone."""
    leaves, spec = flatten(value)
    kinds: list[Any] = []
    for position, one in enumerate(leaves):
        if isinstance(one, torch.Tensor):
            shape = one.dim() if any_shape else one.shape
            strides = None if any_shape else one.stride()
            kinds.append((shape, strides, one.dtype, one.device))
        elif position in numbers and isinstance(one, (int, float)):
            kinds.append(float)
        else:
            kinds.append((type(one), one))
    return spec, kinds
