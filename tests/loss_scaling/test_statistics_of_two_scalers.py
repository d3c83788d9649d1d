# SPDX-License-Identifier: Apache-2.0
"""Two scalers: the update of one comes between a batch norm and its backward pass."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.errors import CaptureError


def _trained(kind: Any) -> tuple[list[torch.Tensor], list[float]]:
    """Return the state after three steps, the second of which skips the critic, and the scales."""
    torch.manual_seed(1)
    generator = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    critic = nn.Linear(3, 1)
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.1)
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
    scalers = [kind("cpu", init_scale=2.0**8) for _ in range(2)]

    def step(real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        fake = generator(noise)
        loss = critic(fake.detach()).mean() - critic(real).mean()
        of_critic.zero_grad()
        scalers[0].scale(loss).backward()
        scalers[0].step(of_critic)
        scalers[0].update()
        of_generator.zero_grad()
        scalers[1].scale(-critic(fake).mean() + fake.square().sum()).backward()
        scalers[1].step(of_generator)
        scalers[1].update()
        return loss.detach()

    call = step
    if kind is amp_ir.GradScaler:
        options: dict[str, Any] = {"optimizer": [of_critic, of_generator], "scaler": scalers}
        call = amp_ir.jit(step, model=[critic, generator], **options)
    for k in range(3):
        noise, real = torch.randn(4, 2), torch.randn(4, 3)
        call(real * (math.inf if k == 1 else 1.0), noise)
    state = [*critic.state_dict().values(), *generator[0].state_dict().values()]
    return [*state, *generator[1].parameters()], [one.get_scale() for one in scalers]


def test_the_selection_of_statistics_is_no_write_to_autograd() -> None:
    # The statistics themselves differ where a step is skipped: PyTorch leaves them updated.
    expected, scales = _trained(torch.amp.GradScaler)
    got, our_scales = _trained(amp_ir.GradScaler)
    assert our_scales == scales == [2.0**7, 2.0**8]
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_an_average_that_an_update_writes_is_said_to_be_that() -> None:
    """The other loss is computed before the first update; the advice, after it, works."""
    torch.manual_seed(0)
    first, second, average = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    average.requires_grad_(requires_grad=False)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (first, second)]
    scalers = [amp_ir.GradScaler("cpu", init_scale=2.0**8) for _ in range(2)]
    is_advised = False

    def step(x: torch.Tensor) -> None:
        scalers[0].scale(first(x).square().mean()).backward()
        scalers[0].step(optimizers[0])
        with torch.no_grad():
            average.weight.lerp_(first.weight, 0.1)
        if is_advised:
            scalers[0].update()
        loss = average(second(x)).square().mean()
        if not is_advised:
            scalers[0].update()
        scalers[1].scale(loss).backward()
        scalers[1].step(optimizers[1])
        scalers[1].update()
        for one in optimizers:
            one.zero_grad()

    models = [first, second, average]
    train = amp_ir.jit(step, model=models, optimizer=optimizers, scaler=scalers)
    with pytest.raises(CaptureError, match=r"the write is that of scaler\.update\(\)"):
        train(torch.randn(4, 3))
    is_advised = True
    before = second.weight.detach().clone()
    train(torch.randn(4, 3))
    assert not torch.equal(second.weight, before)
