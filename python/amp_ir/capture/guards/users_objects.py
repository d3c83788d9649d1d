# SPDX-License-Identifier: Apache-2.0
"""Which objects and classes are the user's, and the attributes of these."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

from amp_ir.capture.guards.places import ABSENT, CONTAINERS, is_plain
from amp_ir.capture.locations import is_users_own


def unwrapped(found: Any) -> Any:
    """Return the function of a method, property or cached property."""
    for key in ("__func__", "fget", "func"):
        inner = getattr(found, key, None)
        if isinstance(inner, FunctionType):
            return inner
    return found


def own_attributes(value: Any) -> dict[str, Any] | None:
    """Return the `__dict__` of an object; None for one that has none, or computes it."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return own if type(own) is dict else None


def is_end(value: Any) -> bool:
    """Return whether a value is a leaf: nothing in it is followed."""
    return value is None or value is ABSENT or is_plain(value) or is_library(value)


def is_library(value: Any) -> bool:
    """Return whether a module is PyTorch's, the standard library's or a builtin: not followed."""
    if isinstance(value, ModuleType):
        root = value.__name__.partition(".")[0]
        return root in ("torch", "amp_ir", "numpy") or root in sys.stdlib_module_names
    if isinstance(value, type):
        return _is_library_class(value)
    if isinstance(value, BuiltinFunctionType):
        return not isinstance(getattr(value, "__self__", None), CONTAINERS)
    return False


def is_users_object(value: Any) -> bool:
    """Return whether an object is of the user's classes, a namespace or a module of theirs."""
    kind = type(value)
    if isinstance(value, (ModuleType, SimpleNamespace, argparse.Namespace)):
        file = getattr(value, "__file__", None)
    elif kind.__module__ == "builtins":
        return False
    else:
        modules: Mapping[str, Any] = sys.modules
        file = getattr(modules.get(kind.__module__), "__file__", None)
    return file is None or is_users_own(file)


def users_classes(kind: type) -> list[type]:
    """Return the user's own among a class and its bases."""
    return [owner for owner in kind.__mro__ if not _is_library_class(owner)]


def names_of_class(kind: type) -> set[str]:
    """Return the names that the user's own among a class and its bases define."""
    return {name for owner in users_classes(kind) for name in vars(owner)}


def _is_library_class(owner: type) -> bool:
    root = str(owner.__module__).partition(".")[0]
    return root in ("torch", "amp_ir", "numpy") or (
        root in sys.stdlib_module_names and root != "__main__"
    )
