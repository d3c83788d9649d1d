# SPDX-License-Identifier: Apache-2.0
"""`torch.nn.init.trunc_normal_` without its loop.

PyTorch draws until every number is between the bounds, which depends on the numbers. A compiled
step draws one uniform number for each element, and inverts the distribution function.
"""

from __future__ import annotations

import math

import torch


def truncated_normal(
    tensor: torch.Tensor,
    mean: float,
    std: float,
    a: float,
    b: float,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Fill a tensor with normal numbers between a and b.

    Computes in float64, in the tail below the mean, where a distribution function has all its
    digits: an interval above the mean is reflected.
    """
    low, high = (a - mean) / std, (b - mean) / std
    is_above = low + high > 0
    if is_above:
        low, high = -high, -low
    begin, end = _below(low), _below(high)
    unit = torch.empty_like(tensor, dtype=torch.float64).uniform_(generator=generator)
    drawn = torch.special.ndtri(begin + unit * (end - begin)) * (-std if is_above else std) + mean
    with torch.no_grad():
        return tensor.copy_(drawn.clamp(a, b))


def _below(x: float) -> float:
    """Return the share of standard normal numbers below x."""
    return 0.5 * math.erfc(-x / math.sqrt(2.0))
