# SPDX-License-Identifier: Apache-2.0
"""Whether dictionaries are unchanged: by their versions, where Python counts every store."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, Protocol

try:
    # Not part of PyTorch's public interface; without it, items are compared.
    from torch._C._dynamo.guards import dict_version
except ImportError:
    dict_version = None  # type: ignore[assignment]

Dictionary = dict[Any, Any]


class Watch(Protocol):
    """Dictionaries, among them those of objects, as they were last found unchanged."""

    def hold(self) -> bool:
        """Return whether all have the keys and values of then; may be False where they do."""

    def refresh(self) -> None:
        """Record all of them as unchanged."""


class Versions:
    """A watch of the dictionaries' versions, which PyTorch counts."""

    def __init__(self, dictionaries: Iterable[Dictionary]) -> None:
        self._dictionaries = _distinct(dictionaries)
        self.refresh()

    def hold(self) -> bool:
        """Return whether nothing was written to any of them since."""
        return list(map(dict_version, self._dictionaries)) == self._known

    def refresh(self) -> None:
        """Record all of them as unchanged."""
        self._known = list(map(dict_version, self._dictionaries))


class Items:
    """A watch of the identity of all keys and values."""

    def __init__(self, dictionaries: Iterable[Dictionary]) -> None:
        self._dictionaries = _distinct(dictionaries)
        self.refresh()

    def hold(self) -> bool:
        """Return whether all have the keys and values of then."""
        return list(map(len, self._dictionaries)) == self._sizes and all(
            map(operator.is_, self._items(), self._known)
        )

    def refresh(self) -> None:
        """Record all of them as unchanged."""
        self._sizes = list(map(len, self._dictionaries))
        self._known = list(self._items())

    def _items(self) -> Iterable[Any]:
        values = map(dict.values, self._dictionaries)
        return chain(chain.from_iterable(self._dictionaries), chain.from_iterable(values))


def _distinct(dictionaries: Iterable[Dictionary]) -> list[Dictionary]:
    return list({id(one): one for one in dictionaries}.values())


def counts_every_store(version: Callable[[Dictionary], int]) -> bool:
    """Return whether stores to an object's attributes give its dictionary another version.

    In Python 3.13 they do not: the values are in the object, and only what is written through the
    dictionary is counted.
    """

    class Probe:
        def __init__(self) -> None:
            self.value = 0

    def store(probe: Any) -> None:
        probe.value = 1

    def is_counted(write: Callable[[Any], object]) -> bool:
        probe = Probe()
        before = version(vars(probe))
        write(probe)
        return version(vars(probe)) != before

    is_counted_at_first = is_counted(store)
    for _ in range(100):  # Python replaces an instruction that runs often by a faster one.
        store(Probe())
    return (
        is_counted_at_first
        and is_counted(store)
        and is_counted(lambda probe: setattr(probe, "value", 1))
        and is_counted(lambda probe: setattr(probe, "other", 1))
        and is_counted(lambda probe: delattr(probe, "value"))
    )


watch: Callable[[Iterable[Dictionary]], Watch] = (
    Versions if dict_version is not None and counts_every_store(dict_version) else Items
)
"""The faster watch of the two that sees every store to an attribute in this Python."""
