# SPDX-License-Identifier: Apache-2.0
"""Consoles for wide tables: a terminal has its width, and a file or a pipe wraps nothing."""

from __future__ import annotations

from rich.console import Console

FILE_COLUMNS = 140


def wide_console(columns: int = FILE_COLUMNS) -> Console:
    """Return standard output as wide as its terminal, or `columns` wide where it is none."""
    console = Console()
    return console if console.is_terminal else Console(width=columns)
