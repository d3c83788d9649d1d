# SPDX-License-Identifier: Apache-2.0
"""Modules that are given another class between steps."""

from __future__ import annotations

import torch
from torch import nn

import amp_ir


class Doubled(nn.Linear):
    """A linear layer times two."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * super().forward(x)


def test_another_class_is_another_program() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x).detach()

    train = amp_ir.jit(step, model=model)
    x = torch.randn(3, 4)
    for kind in (nn.Linear, Doubled, nn.Linear, Doubled):
        model[0].__class__ = kind
        torch.testing.assert_close(train(x), step(x))
    # Changed back, both programs are found again.
    assert [one.reason for one in train.recompiles] == ["module 0 has another forward"]
