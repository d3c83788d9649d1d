# SPDX-License-Identifier: Apache-2.0
"""Weights that hooks of PyTorch's keep in their modules, between compiled steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import amp_ir


def trained(prepare: Callable[[nn.Module, int], None], *, is_ours: bool) -> list[torch.Tensor]:
    """Return the losses, and the weight that the first layer keeps after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
    prepare(model, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) - x[:, :4]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    train = amp_ir.jit(step, model=model, optimizer=optimizer) if is_ours else step
    kept = []
    for number in range(1, 6):
        kept += [train(torch.randn(5, 6)), model[0].weight.detach().clone()]
        prepare(model, number)
    return kept


def pruned(model: nn.Module, number: int) -> None:
    if number % 2 == 0:
        prune.l1_unstructured(model[0], "weight", 0.3)
    if number == 4:
        prune.remove(model[0], "weight")


def weight_normed(model: nn.Module, number: int) -> None:
    if number == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nn.utils.weight_norm(model[0])


def spectral_normed(model: nn.Module, number: int) -> None:
    if number == 0:
        nn.utils.spectral_norm(model[0])
    if number == 3:
        model.eval()


@pytest.mark.parametrize("prepare", [pruned, weight_normed, spectral_normed])
def test_a_kept_weight_is_that_of_the_last_step(prepare: Callable[[nn.Module, int], None]) -> None:
    """The second pruning ranks by the kept weight: it would choose by that of the first."""
    found, wanted = trained(prepare, is_ours=True), trained(prepare, is_ours=False)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
