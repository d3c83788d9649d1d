# SPDX-License-Identifier: Apache-2.0
"""The gradient of `logit` outside of its range, where PyTorch's decomposition differs."""

from __future__ import annotations

import math

import torch


def logit_backward(grad: torch.Tensor, x: torch.Tensor, eps: float | None = None) -> torch.Tensor:
    """Decompose `aten.logit_backward` as its kernels: a negative `eps` is none, and NaN stays.

    With `eps`, PyTorch's vectors give 0 at NaN, and its single elements NaN.
    """
    wide = x.to(torch.float32) if x.dtype in (torch.bfloat16, torch.float16) else x
    slope = (grad.to(wide.dtype) / (wide * (1.0 - wide))).to(x.dtype)
    if eps is None or eps < 0:
        return torch.where((x >= 0.0) & (x <= 1.0), slope, math.nan)
    return torch.where((x < eps) | (x > 1.0 - eps), 0.0, slope)
