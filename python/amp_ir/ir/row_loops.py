# SPDX-License-Identifier: Apache-2.0
"""Loops over the rows of a kernel or blocks of a sum, told from those over elements."""

from __future__ import annotations

from typing import Any

# The names of their variables begin with it.
ROW = "row"
# The names of variables of loops over numbers of rows, one of them at a time, begin with it.
NUMBERS = ROW + "_number"
# The names of variables of loops over blocks of a sum end with it.
BLOCKS = "_block"


def is_over_rows(loop: Any) -> bool:
    """Return whether a loop (`tirx.For`) of an emitted kernel runs over rows."""
    return bool(loop.loop_var.name.startswith(ROW))


def is_over_numbers(loop: Any) -> bool:
    """Return whether a loop (`tirx.For`) of an emitted kernel runs over numbers of rows."""
    return bool(loop.loop_var.name.startswith(NUMBERS))


def is_over_blocks(loop: Any) -> bool:
    """Return whether a loop (`tirx.For`) of an emitted kernel runs over blocks of a sum."""
    return bool(loop.loop_var.name.endswith(BLOCKS))
