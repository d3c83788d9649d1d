# SPDX-License-Identifier: Apache-2.0
"""Names of the last minor version: they work, and warn with the current ones."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def renamed_in(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module; `names` maps old names to current ones."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        _warn(module, name, names[name])
        return getattr(sys.modules[module], names[name])

    return find


class Renamed:
    """An attribute of a class by its old name; `current` is its current one."""

    def __init__(self, current: str) -> None:
        self._current = current

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        """Return the current attribute of an instance."""
        if instance is None:
            return self
        _warn(owner.__name__, self._name, self._current)
        return getattr(instance, self._current)


def _warn(owner: str, old: str, new: str) -> None:
    warnings.warn(
        f"{owner}.{old} is called {owner}.{new} now; the old name goes in the next minor version",
        DeprecationWarning,
        stacklevel=3,
    )
