# SPDX-License-Identifier: Apache-2.0
"""Training steps as users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from step_comparison import Training, integers, normal

Optimizer = Callable[[Any], torch.optim.Optimizer]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))


def classifier(make: Callable[[], nn.Module], optimizer: Optimizer = momentum) -> Training:
    model = make()
    made = optimizer(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        made.step()
        made.zero_grad()
        return loss

    return Training(model, made, step)


def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    return normal(index, 4, 6), integers(index, 3, 4)


def adversaries() -> Training:
    generator = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6))
    critic = nn.Sequential(nn.Linear(6, 5), nn.LeakyReLU(0.2), nn.Linear(5, 1))
    generates = torch.optim.Adam(generator.parameters(), lr=1e-2)
    criticises = torch.optim.RMSprop(critic.parameters(), lr=1e-2)
    loss_of = F.binary_cross_entropy_with_logits

    def step(real: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        criticises.zero_grad()
        fake = critic(generator(noise).detach())
        loss = loss_of(critic(real), torch.ones(4, 1)) + loss_of(fake, torch.zeros(4, 1))
        loss.backward()
        criticises.step()
        critic.requires_grad_(False)
        generates.zero_grad()
        fooled = loss_of(critic(generator(noise)), torch.ones(4, 1))
        fooled.backward()
        generates.step()
        critic.requires_grad_(True)
        return loss, fooled

    return Training([generator, critic], [generates, criticises], step)
