# SPDX-License-Identifier: Apache-2.0
"""Numbers of losses that PyTorch's kernels refuse, and its fake tensors take (PyTorch 2.13)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten


def _smooth_l1_loss(
    pred: torch.Tensor, target: torch.Tensor, reduction: int = 1, beta: float = 1.0
) -> torch.Tensor:
    """Raise RuntimeError, in PyTorch's words, for a beta that is negative or NaN."""
    if not beta >= 0:
        raise RuntimeError("smooth_l1_loss does not support negative values for beta.")
    result: torch.Tensor = aten.smooth_l1_loss.default(pred, target, reduction, beta)
    return result


LOSS_NUMBERS: Mapping[Any, Callable[..., Any]] = {aten.smooth_l1_loss.default: _smooth_l1_loss}
