# SPDX-License-Identifier: Apache-2.0
"""The two orders of an image's dimensions.

Images are [rows, channels, height, width] to a step, and libraries want their channels last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Which dimension of the one order is at each position of the other.
TO_LAST, TO_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)


def moved(index: Sequence[Any], order: Sequence[int]) -> tuple[Any, ...]:
    """Permute an index, or extents, to another order of dimensions."""
    return tuple(index[d] for d in order)
