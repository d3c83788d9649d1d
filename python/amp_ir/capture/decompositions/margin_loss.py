# SPDX-License-Identifier: Apache-2.0
"""The multi-class margin loss at NaN, where PyTorch's decomposition differs from its kernel."""

from __future__ import annotations

import torch


def multi_margin_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    p: float = 1,
    margin: float = 1,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
) -> torch.Tensor:
    """Decompose the loss as its kernel: a margin that is NaN, as one that is held, adds nothing."""
    rows = input.unsqueeze(0) if input.ndim < 2 else input
    classes = target.reshape(-1, 1)
    excess = margin - rows.gather(1, classes) + rows
    power = excess * excess if p == 2 else excess
    if weight is not None:
        power = power * weight[classes]
    is_other = torch.arange(rows.shape[1], device=input.device) != classes
    losses = torch.where((excess > 0) & is_other, power, 0.0).sum(1) / rows.shape[1]
    if reduction == 0:
        return losses.reshape(target.shape)
    return losses.mean() if reduction == 1 else losses.sum()
