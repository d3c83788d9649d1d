# SPDX-License-Identifier: Apache-2.0
"""A subclass of PyTorch's optimizers that looks at its state finds none before that is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import amp_ir


def parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def turn(optimizer: torch.optim.Optimizer, *, is_first: bool) -> None:
    """Let the first step go the other way."""
    for p in parameters(optimizer) if is_first else ():
        p.grad.mul_(-1)


class Counting(torch.optim.Adam):
    """Asks how many parameters have a state."""

    def step(self, closure: Any = None) -> Any:
        turn(self, is_first=len(self.state) == 0)
        return super().step(closure)


class Asking(torch.optim.SGD):
    """Asks for a parameter and for an entry of its state."""

    def step(self, closure: Any = None) -> Any:
        first = parameters(self)[0]
        is_first = first not in self.state or "momentum_buffer" not in self.state[first]
        turn(self, is_first=is_first)
        return super().step(closure)


class Listing(torch.optim.AdamW):
    """Goes through all states."""

    def step(self, closure: Any = None) -> Any:
        turn(self, is_first=not [*self.state.values(), *self.state.items(), *self.state.keys()])
        return super().step(closure)


class Saving(torch.optim.AdamW):
    """Looks at what would be saved."""

    def step(self, closure: Any = None) -> Any:
        turn(self, is_first=not self.state_dict()["state"])
        return super().step(closure)


class Own(torch.optim.SGD):
    """Has a momentum of its own, which begins smaller than PyTorch's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in parameters(self):
            held, rate = self.state[p], self.param_groups[0]["lr"]
            if "momentum_buffer" not in held:
                held["momentum_buffer"] = p.grad * rate
            else:
                held["momentum_buffer"].mul_(0.9).add_(p.grad)
            p.sub_(held["momentum_buffer"], alpha=rate)
        return None


class Reading(torch.optim.Adam):
    """Reads its state after PyTorch has made it: one program is enough."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for p in parameters(self):
            p.data.mul_(1 - 0.01 * self.state[p]["exp_avg"].abs().sum())


KINDS = [Counting, Asking, Listing, Saving, Own, Reading]


def trained(kind: Any, *, compiled: bool) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    options = {"momentum": 0.9} if issubclass(kind, torch.optim.SGD) else {}
    optimizer = kind(model.parameters(), lr=0.1, **options)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    train: Any = amp_ir.jit(step, model=model, optimizer=optimizer) if compiled else step
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    losses = [train(x) for _ in range(4)]
    return [*losses, *model.state_dict().values()], len(train.recompiles) if compiled else 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_step_is_the_one_of_pytorch(kind: Any) -> None:
    (found, recompiles), (expected, _) = trained(kind, compiled=True), trained(kind, compiled=False)
    # Sums of a dozen terms in another order.
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert recompiles == (0 if kind is Reading else 1)
