# SPDX-License-Identifier: Apache-2.0
"""Changes that a step makes to the containers among its arguments.

The capture gives the step containers of its own. Entries that the step takes out of a dict
(`batch.pop("labels")`) are taken out of the caller's at each call; any other change is refused.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import attrs

from amp_ir.capture.call_arguments import NamedArguments
from amp_ir.capture.containers import record_of
from amp_ir.capture.guards.places import ABSENT, in_words

_MOST_DEEP = 32
Path = tuple[Any, ...]


@attrs.frozen(eq=False)
class _Container:
    path: Path
    value: Any
    entries: dict[Any, Any]


@attrs.frozen
class ArgumentChanges:
    """What a step did to its arguments: `removed` keys of dicts, by their path, and the rest."""

    removed: tuple[tuple[Path, Any], ...] = ()
    refused: tuple[str, ...] = ()

    def follow(self, args: tuple[Any, ...]) -> None:
        """Remove from the caller's dicts what the step removes."""
        for path, key in self.removed:
            held: Any = args
            for step in path:
                held = _entries_of(held)[step]
            held.pop(key, None)


class WatchedArguments:
    """The containers of a call's arguments, as they are before the step."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self._containers = list(_containers((), args, 0))

    def changes(self) -> ArgumentChanges:
        """Return how they differ now."""
        removed, refused = [], []
        for one in self._containers:
            now = _entries_of(one.value)
            for key in {**one.entries, **now}:
                before, after = one.entries.get(key, ABSENT), now.get(key, ABSENT)
                if before is after:
                    continue
                if after is ABSENT and isinstance(one.value, (dict, collections.UserDict)):
                    removed.append((one.path, key))
                else:
                    kind = type(one.value).__name__
                    at = "".join(f"[{step!r}]" for step in one.path[1:])
                    where = f"argument {one.path[0]}{at}" if one.path else "its arguments"
                    refused.append(f"changes {where} (a {kind}, at {in_words(key)})")
        return ArgumentChanges(tuple(removed), tuple(dict.fromkeys(refused)))


def _containers(path: Path, value: Any, depth: int) -> Iterator[_Container]:
    entries = None if depth > _MOST_DEEP else _found_entries(value)
    if entries is None:
        return
    if path and not isinstance(value, (tuple, NamedArguments)):
        yield _Container(path, value, entries)
    for key, one in entries.items():
        yield from _containers((*path, key), one, depth + 1)


def _entries_of(value: Any) -> dict[Any, Any]:
    """Return the entries of a container by key, position or attribute."""
    return _found_entries(value) or {}


def _found_entries(value: Any) -> dict[Any, Any] | None:
    """Return the entries of a container; None for a leaf."""
    if isinstance(value, collections.UserDict):
        return dict(value.data)
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (list, tuple, collections.deque)):
        return dict(enumerate(value))
    record = record_of(value)
    return (
        None if record is None else dict(zip(record.shape.attributes, record.values, strict=True))
    )
