# SPDX-License-Identifier: Apache-2.0
"""Two jitted steps on the same models, as of a GAN: each leaves alone what only the other has."""

from __future__ import annotations

import torch
from torch import nn

import amp_ir

_Gradients = list[torch.Tensor | None]


def _trained(*, is_ours: bool) -> list[_Gradients]:
    """Return what is in each `p.grad` after each call."""
    torch.manual_seed(1)
    critic, generator = nn.Linear(3, 1), nn.Linear(2, 3)
    unused = nn.Linear(2, 2)
    models = [critic, generator, unused]
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.1)

    def criticise(real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            fake = generator(noise)
        loss = critic(fake).mean() - critic(real).mean()
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        return loss.detach()

    def generate(noise: torch.Tensor) -> torch.Tensor:
        critic.requires_grad_(False)
        loss = -critic(generator(noise)).mean()
        of_generator.zero_grad()
        loss.backward()
        of_generator.step()
        critic.requires_grad_(True)
        return loss.detach()

    def clear(noise: torch.Tensor) -> torch.Tensor:
        generator.zero_grad()
        unused.weight.grad = None
        return noise.sum()

    first, second, third = criticise, generate, clear
    if is_ours:
        first = amp_ir.jit(criticise, model=models, optimizer=of_critic)
        second = amp_ir.jit(generate, model=models, optimizer=of_generator)
        third = amp_ir.jit(clear, model=models)
    seen = []
    for k in range(3):
        calls = [lambda: first(torch.randn(4, 3), torch.randn(4, 2))]
        calls += [lambda: second(torch.randn(4, 2))] if k % 2 == 0 else []
        calls += [lambda: third(torch.randn(4, 2))] if k == 2 else []
        for call in calls:
            call()
            gradients = [p.grad for model in models for p in model.parameters()]
            seen.append([None if one is None else one.clone() for one in gradients])
        unused.weight.grad = torch.ones(2, 2)  # the user's own
    return seen


def test_a_step_keeps_the_gradients_that_it_does_not_touch() -> None:
    expected, got = _trained(is_ours=False), _trained(is_ours=True)
    assert [[g is None for g in one] for one in got] == [[g is None for g in x] for x in expected]
    for one, other in zip(got, expected, strict=True):
        for gradient, wanted in zip(one, other, strict=True):
            if gradient is not None:
                torch.testing.assert_close(gradient, wanted)
