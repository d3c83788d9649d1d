# SPDX-License-Identifier: Apache-2.0
"""Complex tensors that a step reads from outside, as Llama's table of rotations is kept."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.errors import StateError


class Rotated(nn.Module):
    """Pairs of features rotated by a complex table, which is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table = torch.polar(torch.ones(6, 4), torch.arange(24.0).view(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return f32[batch, 8] rotated by the first rows of the table."""
        pairs = torch.view_as_complex(self.linear(x).float().unflatten(1, (4, 2)))
        return torch.view_as_real(pairs * self.table[: len(x)]).flatten(1)


def train(model: Rotated, *, compiled: bool) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sub(1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = amp_ir.jit(step, model=model, optimizer=optimizer) if compiled else step
    x = torch.linspace(-1, 1, 24).view(3, 8)
    losses = [run(x)]
    model.table.mul_(0.5 - 1j)  # is read at every call
    losses.append(run(x))
    model.table = model.table[:5].conj().resolve_conj()  # compiles again
    losses.append(run(x))
    if compiled:
        assert len(run.recompiles) == 1
    return [*losses, *(one.detach() for one in model.parameters())]


def test_a_table_of_rotations_is_read_at_every_call() -> None:
    torch.manual_seed(0)
    model = Rotated()
    twin = copy.deepcopy(model)
    torch.testing.assert_close(
        train(twin, compiled=True), train(model, compiled=False), rtol=1e-5, atol=1e-6
    )


def test_a_table_that_is_conjugated_only_when_it_is_read_is_refused() -> None:
    model = Rotated()
    model.table = model.table.conj()
    step = amp_ir.jit(lambda x: model(x).mean(), model=model)
    with pytest.raises(StateError) as refused:
        step(torch.ones(2, 8))
    assert str(refused.value) == (
        "attribute 'table' of module (the model itself) is complex (torch.complex64); keep "
        "torch.view_as_real of it, and call torch.view_as_complex in the step"
    )
