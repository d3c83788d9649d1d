# SPDX-License-Identifier: Apache-2.0
"""Lists in messages, shortened."""

from __future__ import annotations

from collections.abc import Sequence


def short_list(items: Sequence[object], *, most: int = 3) -> str:
    """Return "a; b; c; and 4 more"."""
    shown = [str(one) for one in items[:most]]
    more = [f"and {len(items) - most} more"] if len(items) > most else []
    return "; ".join([*shown, *more])


def short_names(names: Sequence[str], *, most: int = 3) -> str:
    """Return "a, b, c and 4 more", within a sentence."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
