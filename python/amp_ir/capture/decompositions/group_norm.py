# SPDX-License-Identifier: Apache-2.0
"""`torch.group_norm` over groups without elements, while a step is traced."""

from __future__ import annotations

import math
from typing import Any

import torch

# Patched during a capture, so that torch.nn.functional calls the function here.
_group_norm: Any = torch.group_norm


def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,  # noqa: FBT001, FBT002 - torch's own signature
) -> torch.Tensor:
    """Replace `torch.group_norm`, whose gradient on fake tensors divides by the positions' number.

    Without positions its kernel gives NaN for the weight's gradient, unless there are no samples
    either, and 0 for the bias's.
    """
    y: torch.Tensor = _group_norm(input, num_groups, weight, bias, eps, cudnn_enabled)
    if math.prod(input.shape[2:]) != 0:
        return y
    per_channel = (1, input.shape[1], *(1 for _ in input.shape[2:]))
    result = input
    if weight is not None:
        factor = weight * math.nan if len(input) > 0 else weight
        result = result * factor.reshape(per_channel)
    if bias is not None:
        result = result + bias.reshape(per_channel)
    return result.to(y.dtype)
