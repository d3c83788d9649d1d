# SPDX-License-Identifier: Apache-2.0
"""What each call of a step keeps in the user's objects, and guards on what is there before it."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from amp_ir.capture.batch import Results
from amp_ir.capture.guards.places import Place, change_in_words, is_same
from amp_ir.capture.guards.read_places import kinds_of, tensors_in


@attrs.frozen(eq=False)
class KeptResult:
    """What each call puts in a place, built of the tensors of its batch and its results.

    `is_read` says that the step may read the place before. `accepted` are an example of what a call
    puts there, and what was there before the first one, for which the step is the same; it is empty
    where the step reads nothing there, or reads what is there as an input. `any_shape` says that it
    asks nothing there for its shape.
    """

    place: Place
    value: Results
    in_words: str
    is_read: bool
    accepted: tuple[Any, ...] = ()
    any_shape: bool = False

    @property
    def is_guarded(self) -> bool:
        """Whether the guards of other objects hold for what was there before alone."""
        return self.place.is_loaded and not self.is_read

    @property
    def held_tensors(self) -> bool:
        """Whether tensors were there before the step."""
        return bool(tensors_in(self.place.before))

    def install(self, tensors: list[torch.Tensor]) -> None:
        """Put the value of this call in its place."""
        self.place.put(self.value.build(tensors))

    def holds(self) -> bool:
        """Return whether the step is the same for what is in the place now."""
        if not self.accepted:
            return True
        example, before = self.accepted
        now = self.place.now()
        if is_same(now, before):
            return True
        fits = self.any_shape or _shapes(now) in (_shapes(example), _shapes(before))
        return fits and self._is_like(now)

    def change(self) -> str:
        """Describe what is there now, and was not."""
        return f"{self.place.name()} {change_in_words(self.accepted[-1], self.place.now())}"

    def _is_like(self, value: Any) -> bool:
        """Return whether a value is one that a call may put there, but for shapes."""
        example, numbers = self.accepted[0], self.value.numbers
        return bool(
            kinds_of(value, numbers, is_read=False) == kinds_of(example, numbers, is_read=False)
        )


def _shapes(value: Any) -> list[tuple[Any, ...]]:
    return [(one.shape, one.stride()) for one in tensors_in(value)]
