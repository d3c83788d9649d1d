# SPDX-License-Identifier: Apache-2.0
"""`x[index] = number` where the number is an input: PyTorch makes a constant tensor of it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import amp_ir

X = torch.linspace(-1.5, 1.4, 12, dtype=torch.float64).view(3, 4)


def by_mask(y: torch.Tensor, t: float) -> None:
    y[y > 0.2] = t


def compared_again(y: torch.Tensor, t: float) -> None:
    y[y < 0] = -t
    y[y.eq(-t)] = 2 * t


def by_indices(y: torch.Tensor, t: float) -> None:
    y[torch.tensor([0, 2]), torch.tensor([1, 3])] = t


def by_a_number_in_a_tensor(y: torch.Tensor, t: float) -> None:
    y[y[:, 0].argmax()] = t


def by_slices(y: torch.Tensor, t: float) -> None:
    y[:, 1:3] = t
    y[0] = t * t
    y[1, 1] = -t


def through_data(y: torch.Tensor, t: float) -> None:
    y.detach()[y > 0.2] = t


def to_integers(y: torch.Tensor, t: float) -> None:
    counts = torch.zeros(3, 4, dtype=torch.int64)
    counts[y > 0] = 10 * t
    y += counts


@pytest.mark.parametrize(
    "assign",
    [
        by_mask, compared_again, by_indices, by_a_number_in_a_tensor, by_slices, through_data,
        to_integers,
    ],
)  # fmt: skip
def test_assigned_numbers_are_read_at_every_call(
    assign: Callable[[torch.Tensor, float], None],
) -> None:
    box, model = SimpleNamespace(number=0.0), nn.Linear(1, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        assign(y, box.number)
        return y

    train = amp_ir.jit(step, model=model)
    for number in (0.31, 0.42, 0.53, 0.64, 0.75):
        box.number = number
        # Not a bit differs: nothing is computed with the number but products.
        torch.testing.assert_close(train(X), step(X), rtol=0, atol=0)


@pytest.mark.parametrize("foreach", [False, True])
def test_rprop_in_float64(foreach: bool) -> None:
    """It compares the factors that it has assigned by a mask with its `etas`."""

    def trained(*, is_ours: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        optimizer = torch.optim.Rprop(model.parameters(), lr=0.05, foreach=foreach)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        train = amp_ir.jit(step, model=model, optimizer=optimizer) if is_ours else step
        torch.manual_seed(1)
        losses = []
        for k in range(8):
            if k == 6:
                optimizer.param_groups[0]["etas"] = (0.4, 1.3)
            losses.append(train(torch.randn(3, 4, dtype=torch.float64)))
        state = [optimizer.state[p]["prev"] for p in model.parameters()]
        return [*losses, *state, *(one.detach() for one in model.parameters())]

    # Sums in another order, over 8 steps.
    torch.testing.assert_close(trained(is_ours=True), trained(is_ours=False), rtol=1e-9, atol=1e-12)
