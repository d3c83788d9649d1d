# SPDX-License-Identifier: Apache-2.0
"""Lists in messages, shortened."""

from __future__ import annotations

from collections.abc import Sequence


def short_list(items: Sequence[object], *, most: int = 3) -> str:
    """Return "a; b; c; and 4 more"."""
    shown = [str(one) for one in items[:most]]
    more = [f"and {len(items) - most} more"] if len(items) > most else []
    return "; ".join([*shown, *more])
