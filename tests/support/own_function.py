# SPDX-License-Identifier: Apache-2.0
"""A torch.autograd.Function of the user's."""

from __future__ import annotations

from typing import Any

import torch


class Doubled(torch.autograd.Function):
    """A function with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return 2 * x."""
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Return 3 * grad, by which a test knows that this ran."""
        return grad * 3
