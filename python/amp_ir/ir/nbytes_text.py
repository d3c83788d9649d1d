# SPDX-License-Identifier: Apache-2.0
"""Bytes as text."""

from __future__ import annotations


def mebibytes(nbytes: float) -> str:
    """Format bytes for people."""
    if 0 < nbytes < 10_486:  # else it would read 0.00
        return f"{nbytes:.0f} B" if nbytes < 1024 else f"{nbytes / 1024:.1f} KiB"
    number = nbytes / 2**20
    return f"{number:.{0 if number >= 1000 else 1 if number >= 10 else 2}f} MiB"
