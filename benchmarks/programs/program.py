# SPDX-License-Identifier: Apache-2.0
"""One program of the coverage list: a training step as people write it, and batches for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import attrs
import torch

# The block in which the step computes its loss: torch.autocast in the eager run that is compared
# with our bfloat16, else nothing.
Precision = Callable[[], contextlib.AbstractContextManager[Any]]


@attrs.frozen
class Made:
    """A program with its models, optimizers and step.

    `step(*batch(k))` returns the loss, or a tensor of several.
    """

    model: Any
    optimizer: Any
    step: Callable[..., torch.Tensor]
    batch: Callable[[int], tuple[Any, ...]]

    @property
    def models(self) -> list[torch.nn.Module]:
        """Return the models as a list."""
        return list(self.model) if isinstance(self.model, (list, tuple)) else [self.model]


@attrs.frozen
class Program:
    """A program of the list; `make(precision)` builds it, with the same numbers after one seed.

    `reason` says why it may differ from PyTorch by more than the rest does.
    """

    name: str
    kind: str
    make: Callable[[Precision], Made]
    reason: str = ""


def normal(k: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return normal numbers, the same for the same `k` and `seed`."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * k + seed))


def uniform(k: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return numbers in [0, 1)."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1000 * k + seed))


def integers(k: int, high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return integers in [0, high)."""
    generator = torch.Generator().manual_seed(1000 * k + seed)
    return torch.randint(0, high, shape, generator=generator)
