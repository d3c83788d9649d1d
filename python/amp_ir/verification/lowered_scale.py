# SPDX-License-Identifier: Apache-2.0
"""A loss scale that is too large for a batch, lowered as training would lower it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch


def dynamic_scales(scalers: Sequence[Any]) -> list[torch.Tensor]:
    """Return the scales of the scalers that change theirs."""
    found = (getattr(one, "_scale", None) for one in scalers if getattr(one, "dynamic", True))
    return [one for one in found if one is not None]


def lower_until(scales: list[torch.Tensor], is_finite: Callable[[], bool]) -> float | None:
    """Set all scales to the largest power of two below them with which a step is finite.

    Return it; None, and the scales are as before, where not even 1 is small enough.
    """
    before = [float(one) for one in scales]

    def is_finite_at(exponent: int) -> bool:
        for one in scales:
            one.fill_(2.0**exponent)
        return is_finite()

    lowest, highest = 0, math.ceil(math.log2(max(before, default=1.0))) - 1
    if highest < 0 or not is_finite_at(lowest):
        for one, scale in zip(scales, before, strict=True):
            one.fill_(scale)
        return None
    while lowest < highest:
        middle = (lowest + highest + 1) // 2
        lowest, highest = (middle, highest) if is_finite_at(middle) else (lowest, middle - 1)
    for one in scales:
        one.fill_(2.0**lowest)
    return 2.0**lowest
