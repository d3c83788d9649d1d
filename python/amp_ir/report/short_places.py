# SPDX-License-Identifier: Apache-2.0
"""Places and names cut to the width of a table's column."""

from __future__ import annotations

import os
import re

# What precedes the name of an installed package, or of a module of Python's own.
_INSTALLED = re.compile(r"^.*/(?:(?:site|dist)-packages|lib/python3\.\d+)/")
_LEAST = 12  # letters of a module that say anything
_SHORT_DTYPES = {"bfloat16": "bf16"}


def short_dtype(dtype: str) -> str:
    """Return the name of a dtype in few letters: bf16, f32, i64; "bool" is as it is."""
    return _SHORT_DTYPES.get(dtype, re.sub(r"^(f|i|u)[a-z]*(?=\d)", r"\1", dtype))


def cut(text: str, columns: int) -> str:
    """Return a text without its middle where it is longer than `columns`."""
    if len(text) <= columns:
        return text
    after = (columns - 1) * 2 // 3
    return f"{text[: columns - 1 - after]}…{text[len(text) - after :]}" if columns > 1 else "…"


def short_path(path: str) -> str:
    """Return a file as a package has it, or relative to the current directory if it is there."""
    here = os.getcwd() + os.sep
    return path.removeprefix(here) if path.startswith(here) else _INSTALLED.sub("", path)


def short_place(place: str, columns: int) -> str:
    """Return a location's text, "module (phase), file:line", without its phase, and not longer."""
    module, _, file = place.rpartition(", ") if ", " in place else (place, "", "")
    module, file = module.rpartition(" (")[0], short_path(file)
    if not file:
        return cut(module, columns)
    for shown in (file, file.rpartition("/")[2]):
        whole = f"{module}, {shown}" if module else shown
        if len(whole) <= columns:
            return whole
    left = columns - len(shown) - 2
    return f"{cut(module, left)}, {shown}" if module and left >= _LEAST else cut(shown, columns)


def short_nbytes(nbytes: int) -> str:
    """Return bytes as "1.5 MiB", "1.5 KiB" or "12 B"."""
    if nbytes >= 2**20:
        return f"{nbytes / 2**20:.1f} MiB"
    return f"{nbytes / 2**10:.1f} KiB" if nbytes >= 2**10 else f"{nbytes} B"
