# SPDX-License-Identifier: Apache-2.0
"""The lengths of the bars beside numbers of which some may be infinite."""

from __future__ import annotations

import math
from collections.abc import Sequence


def bar_shares(numbers: Sequence[float]) -> list[float]:
    """Return each as a share of the largest finite one, at most 1; infinite ones have full bars."""
    largest = max((one for one in numbers if math.isfinite(one)), default=0.0) or 1.0
    return [min(one / largest, 1.0) for one in numbers]
