# SPDX-License-Identifier: Apache-2.0
"""Attributes that the user's code may store under computed names: `setattr(self, f"a{i}", x)`.

No bytecode has their names, so that all attributes of the objects that such code reaches are kept,
and those that have changed at the end of the step are places like those that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

from amp_ir.capture.guards.code_reads import CodeReads
from amp_ir.capture.guards.places import ABSENT, Place
from amp_ir.capture.guards.users_objects import is_users_object
from amp_ir.capture.patches.thread_patches import original_of

_INTERNAL = frozenset(vars(torch.nn.Module()))


@attrs.frozen(eq=False)
class _Kept:
    own: dict[str, Any]
    name: Callable[[], str]
    before: dict[str, Any]
    ignored: frozenset[str]
    is_users: bool


class UnnamedAttributes:
    """The attributes of objects as they were before code that may store under any name."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}

    def keep(
        self, value: Any, own: dict[str, Any] | None, name: Callable[[], str], reads: CodeReads
    ) -> None:
        """Keep the attributes of an object of the user's, if the code may store under any name."""
        if not reads.stores_unnamed or type(own) is not dict or id(own) in self._kept:
            return
        is_users, is_module = is_users_object(value), isinstance(value, torch.nn.Module)
        if is_users or is_module:
            ignored = _INTERNAL if is_module else frozenset()
            self._kept[id(own)] = _Kept(own, name, dict(own), ignored, is_users)

    def add_changed(self, places: dict[tuple[int, str, Any], Place]) -> None:
        """Add the places of attributes that have changed, but for those that are known."""
        for kept in self._kept.values():
            for key in _changed(kept):
                at = (id(kept.own), "entry", key)
                if at not in places:
                    before = original_of(kept.before.get(key, ABSENT))
                    name = _named(key, kept.name)
                    places[at] = Place(kept.own, "entry", key, name, before, is_loaded=True)


def _changed(kept: _Kept) -> Iterator[str]:
    for key in {**kept.before, **kept.own}:
        if kept.own.get(key, ABSENT) is not kept.before.get(key, ABSENT):
            # What PyTorch's own modules keep for themselves is not the user's.
            if key not in kept.ignored and (kept.is_users or not key.startswith("_")):
                yield key


def _named(key: str, name: Callable[[], str]) -> Callable[[], str]:
    return lambda: f"attribute {key!r} of {name()}"
