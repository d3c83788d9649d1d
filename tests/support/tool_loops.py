# SPDX-License-Identifier: Apache-2.0
"""A model and batches for loops that Fabric or Accelerate own, and how two of them are compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


class ProbedNet(torch.nn.Module):
    """A classifier of 8 numbers in 4 classes that remembers whether it was evaluated in autocast.

    With `refuses_autocast` it fails where it is trained so, by which a test sees whose the casts
    are.
    """

    def __init__(self, dropout: float = 0.0, *, refuses_autocast: bool = False) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU())
        self.dropout = torch.nn.Dropout(dropout)
        self.head = torch.nn.Linear(16, 4)
        self.refuses_autocast = refuses_autocast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.refuses_autocast and torch.is_autocast_enabled("cpu"):
            raise RuntimeError("trained under autocast")
        return self.head(self.dropout(self.body(x)))


def batches(count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(8, 8, generator=generator)
        yield x, (x.sum(1) > 0).long() + 2 * (x[:, 0] > 0).long()


def assert_alike(ours: Any, theirs: Any, tolerance: float) -> None:
    """Compare what two runs returned: the rows of numbers of their batches, and the model."""
    assert len(ours[0]) == len(theirs[0]) >= 30
    for one, other in zip(ours[0], theirs[0], strict=True):
        assert one == pytest.approx(other, rel=tolerance, abs=tolerance)
    for p, q in zip(ours[1].parameters(), theirs[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


def are_equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
