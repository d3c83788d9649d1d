# SPDX-License-Identifier: Apache-2.0
"""The scalar functions of the pointwise tables, on torch tensors.

`amp_ir.loops.math` has the same names for loop expressions, so a formula such as
`lambda m, grad, y: grad * (1 - y * y)` is written once and serves as reference and as kernel.
"""

from __future__ import annotations

import math

import torch

exp = torch.exp
log = torch.log
log1p = torch.log1p
tanh = torch.tanh
sigmoid = torch.sigmoid
sqrt = torch.sqrt
rsqrt = torch.rsqrt
absolute = torch.abs


def bell(x: torch.Tensor) -> torch.Tensor:
    """Return e^(-x^2 / 2)."""
    return torch.exp(-0.5 * x * x)


def normal_cdf(x: torch.Tensor, bell: torch.Tensor) -> torch.Tensor:
    """Return the normal distribution function at x; `bell` is e^(-x^2 / 2)."""
    # torch.special.ndtr has no digits left below -8.
    return 0.5 * torch.special.erfc(x * -math.sqrt(0.5))


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return an element times a number; 0 times infinity is NaN."""
    return x * factor


def divided(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """Return an element divided by a number; by 0 it is infinite or NaN."""
    return x / divisor


def power(base: torch.Tensor, exponent: float) -> torch.Tensor:
    """Return `base ** exponent`."""
    return torch.pow(base, exponent)


def maximum(x: torch.Tensor, bound: float) -> torch.Tensor:
    """Return the larger of an element and a number; NaN if the element is."""
    return torch.clamp(x, min=bound)


def minimum(x: torch.Tensor, bound: float) -> torch.Tensor:
    """Return the smaller of an element and a number; NaN if the element is."""
    return torch.clamp(x, max=bound)


def select(
    condition: torch.Tensor, chosen: torch.Tensor | float, other: torch.Tensor | float
) -> torch.Tensor:
    """Return `chosen` where the condition is true, else `other`; the one not taken may be NaN."""
    return torch.where(condition, chosen, other)
