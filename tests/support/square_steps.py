# SPDX-License-Identifier: Apache-2.0
"""The training step of tests that are not about training steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def square_step(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A step that makes the mean square of the model's results smaller, and returns it."""

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
