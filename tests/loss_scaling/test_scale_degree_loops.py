# SPDX-License-Identifier: Apache-2.0
"""Loops of several models under loss scales, with zero_grad in every place that makes sense.

Those of "Automatic Mixed Precision examples" in PyTorch's documentation that need two models, and
DCGAN's. The step is captured only; training under the same loops is in test_loss_scale_steps.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import amp_ir
from amp_ir.errors import LossScaleError

# Where gradients are cleared: the discriminator's or the generator's, and ahead of what.
PLACES = ("d first", "g first", "g between", "d between", "d last", "g last")


def _cleared(places: frozenset[str], scalers: int) -> tuple[Any, dict[str, Any]]:
    d = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    g = nn.Linear(2, 4)
    of_d, of_g = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (d, g))
    kinds = [torch.amp.GradScaler("cpu") for _ in range(scalers)]
    first, last = kinds[0], kinds[-1]

    def clear(moment: str) -> None:
        for name, optimizer in (("d", of_d), ("g", of_g)):
            if f"{name} {moment}" in places:
                optimizer.zero_grad()

    def step(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        clear("first")
        fake = g(noise)
        for loss in (functional.softplus(-d(x)), functional.softplus(d(fake.detach()))):
            first.scale(loss.mean()).backward()
        first.step(of_d)
        if scalers == 2:
            first.update()
        clear("between")
        loss = -d(fake).mean()
        last.scale(loss).backward()
        last.step(of_g)
        last.update()
        clear("last")
        return loss

    return step, {"model": [d, g], "optimizer": [of_d, of_g], "scaler": kinds}


def _is_right(places: frozenset[str]) -> bool:
    """Whether each optimizer's gradients are cleared once a turn before its own loss."""
    return bool(places & {"d first", "d last"}) and bool(
        places & {"g first", "g between", "g last"}
    )


RIGHT = [
    places for places in map(frozenset, itertools.combinations(PLACES, 2)) if _is_right(places)
]
BATCH = torch.randn(6, 4), torch.randn(6, 2)


@pytest.mark.parametrize("scalers", [1, 2])
def test_a_gan_is_never_refused_wherever_it_clears_its_gradients(scalers: int):
    assert len(RIGHT) == 6
    for places in RIGHT:
        step, parts = _cleared(places, scalers)
        amp_ir.trace_step(step, BATCH, **parts)


def test_gradients_that_the_next_step_adds_to_are_still_held_to_their_degree():
    """The same sum of unscaled and scaled gradients, where an optimizer steps with it."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")

    def step(x: torch.Tensor) -> torch.Tensor:
        scaler.scale(model(x).mean()).backward()
        scaler.step(optimizer)
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        optimizer.step()
        scaler.update()
        return loss

    with pytest.raises(LossScaleError, match="relax.add combines"):
        amp_ir.trace_step(step, BATCH[:1], model=model, optimizer=optimizer, scaler=scaler)
