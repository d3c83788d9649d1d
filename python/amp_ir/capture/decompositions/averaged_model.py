# SPDX-License-Identifier: Apache-2.0
"""`torch.optim.swa_utils.AveragedModel.update_parameters` without its branch on the count.

The first update copies the weights, every later one averages them. PyTorch reads the count for
that; a compiled step computes the average and chooses by the count.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

_update_parameters: Any = AveragedModel.update_parameters


class _LaterCount:
    """The count of an averaged model, of which PyTorch asks only whether it is past the first."""

    def __init__(self, count: torch.Tensor) -> None:
        self._count = count

    def __eq__(self, other: object) -> bool:
        return False

    def __gt__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]

    def __iadd__(self, other: int) -> _LaterCount:
        return self

    def to(self, device: Any) -> torch.Tensor:
        """Return the count itself."""
        return self._count.to(device)


class _Later:
    """An averaged model after its first update."""

    def __init__(self, averaged: AveragedModel) -> None:
        self._averaged = averaged
        self.n_averaged = _LaterCount(averaged.n_averaged)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._averaged, name)


def update_parameters(self: AveragedModel, model: torch.nn.Module) -> None:
    """Average the parameters of `model`, or copy them where the count is 0."""
    is_first = self.n_averaged == 0
    _update_parameters(_Later(self), model)
    for averaged, value in _pairs(self, model):
        here = averaged.detach()
        here.copy_(torch.where(is_first, value.detach().to(here.device, here.dtype), here))
    self.n_averaged += 1


def _pairs(
    averaged: AveragedModel, model: torch.nn.Module
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if averaged.use_buffers:
        ours = itertools.chain(averaged.module.parameters(), averaged.module.buffers())
        return zip(ours, itertools.chain(model.parameters(), model.buffers()), strict=False)
    return zip(averaged.parameters(), model.parameters(), strict=False)
