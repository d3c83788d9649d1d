# SPDX-License-Identifier: Apache-2.0
"""Guards on what the user's code asks a function or a property for: read again at every call."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator
from typing import Any

import attrs

from amp_ir.capture.guards.places import change_in_words, is_same


@attrs.frozen(eq=False)
class _Reading:
    name: Callable[[], str]
    read: Callable[[], Any]
    before: Any

    def holds(self) -> bool:
        return is_same(self.read(), self.before)


class Readings:
    """Values as they were when the step first asked for them, by keys."""

    def __init__(self) -> None:
        self._found: dict[Hashable, _Reading] = {}

    def add(self, key: Hashable, name: Callable[[], str], read: Callable[[], Any]) -> None:
        """Read a value, unless one of this key is known."""
        if key not in self._found:
            self.known(key, name, read, before=read())

    def known(
        self, key: Hashable, name: Callable[[], str], read: Callable[[], Any], *, before: object
    ) -> None:
        """Add a value that is known."""
        self._found[key] = _Reading(name, read, before)

    def are_of(self, ids: Container[int]) -> bool:
        """Return whether one is of an object with one of these ids, which its key begins with."""
        return any(isinstance(key, tuple) and key[0] in ids for key in self._found)

    def hold(self) -> bool:
        """Return whether all values are as they were."""
        return all(one.holds() for one in self._found.values())

    def changes(self) -> Iterator[str]:
        """Describe each that differs."""
        for one in self._found.values():
            if not one.holds():
                yield f"{one.name()} {change_in_words(one.before, one.read())}"
