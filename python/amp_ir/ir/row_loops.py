# SPDX-License-Identifier: Apache-2.0
"""Loops over the rows of a kernel, which passes tell from those over a row's elements."""

from __future__ import annotations

from typing import Any

# The names of their variables begin with it.
ROW = "row"


def is_over_rows(loop: Any) -> bool:
    """Return whether a loop (`tirx.For`) of an emitted kernel runs over rows."""
    return bool(loop.loop_var.name.startswith(ROW))
