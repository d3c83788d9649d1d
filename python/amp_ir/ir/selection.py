# SPDX-License-Identifier: Apache-2.0
"""What a user's patterns select: modules by their paths, ops by their names."""

from __future__ import annotations

from fnmatch import fnmatchcase


def is_inside(module: str, pattern: str) -> bool:
    """Return whether a module's path matches a glob, or is inside of one that does."""
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")


def names_of_op(name: str) -> tuple[str, str]:
    """Return the names by which an op is selected: in full, and what follows the last dot."""
    return name, name.rpartition(".")[2]
