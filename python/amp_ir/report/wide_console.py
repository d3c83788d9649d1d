# SPDX-License-Identifier: Apache-2.0
"""Where tables are printed: a terminal has its own width, and a file or a pipe wraps nothing."""

from __future__ import annotations

import os

from rich.console import Console

FILE_COLUMNS = 140


def wide_console(columns: int = FILE_COLUMNS) -> Console:
    """Standard output as wide as its terminal or as COLUMNS says; else `columns` wide."""
    console = Console()
    is_given = console.is_terminal or "COLUMNS" in os.environ
    return console if is_given else Console(width=columns)
