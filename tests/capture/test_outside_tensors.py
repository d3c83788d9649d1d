# SPDX-License-Identifier: Apache-2.0
"""Tensors that a step reads from a closure, where its batch has none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import amp_ir

X, Y = torch.randn(3, 4), torch.randn(3, 4)


@pytest.mark.parametrize(
    "step",
    [
        lambda: torch.maximum(X, Y),
        lambda: torch.where(X > Y, X, Y).sum(),
        lambda: (X - Y).abs() * Y,
    ],
)
def test_the_first_op_reads_two(step: Callable[[], torch.Tensor]) -> None:
    """The first node of the graph is then one of the tensors that become inputs."""
    train = amp_ir.jit(step, model=nn.Linear(1, 1))
    for _ in range(3):
        torch.testing.assert_close(train(), step())
        X.mul_(-0.5)


def test_all_of_the_data_is_in_a_closure() -> None:
    def trained(*, is_ours: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        scale = nn.Parameter(torch.ones(4))
        holder = nn.ParameterList([scale])
        optimizer = torch.optim.SGD(holder.parameters(), lr=0.1)

        def step() -> torch.Tensor:
            loss = (torch.maximum(X, Y) * holder[0]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        train = amp_ir.jit(step, model=holder, optimizer=optimizer) if is_ours else step
        return [*(train() for _ in range(3)), scale.detach()]

    for found, wanted in zip(trained(is_ours=True), trained(is_ours=False), strict=True):
        torch.testing.assert_close(found, wanted)
