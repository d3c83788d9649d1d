# SPDX-License-Identifier: Apache-2.0
"""Optimizers of tensors that are in no module: `Adam([torch.zeros(1, requires_grad=True)])`."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.capture.arguments import refuse_bare_tensors
from amp_ir.errors import ArgumentError
from amp_ir.ir.bare_tensors import BareTensors

# A few float32 sums of 12 elements, five steps.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Agent:
    """An actor whose entropy is weighted by a temperature, trained by its own optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.actor = nn.Linear(4, 3)
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.optimizer = torch.optim.SGD(self.actor.parameters(), lr=0.1)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], lr=0.1)

    def step(self, x: torch.Tensor) -> tuple[float, float]:
        log_probability = self.actor(x).log_softmax(-1)
        loss = (self.log_alpha.exp().detach() * log_probability).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        alpha_loss = -(self.log_alpha * (log_probability + 1.5).detach()).mean()
        self.alpha_optimizer.zero_grad()
        alpha_loss.backward()
        self.alpha_optimizer.step()
        return loss.item(), alpha_loss.item()

    def state(self) -> list[torch.Tensor]:
        moments = self.alpha_optimizer.state[self.log_alpha]
        assert self.log_alpha.grad is not None
        return [self.actor.weight, self.log_alpha, self.log_alpha.grad, *moments.values()]


def batch(seed: int) -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))


def jitted(agent: Agent, **options: Any) -> Any:
    optimizers = [agent.optimizer, agent.alpha_optimizer]
    return amp_ir.jit(agent.step, model=agent.actor, optimizer=optimizers, **options)


def test_a_tensor_in_no_module_is_trained_as_in_eager() -> None:
    ours, eager = Agent(), Agent()
    train = jitted(ours)
    kept = ours.log_alpha
    for seed in range(5):
        torch.testing.assert_close(train(batch(seed)), eager.step(batch(seed)), **CLOSE)
        torch.testing.assert_close(ours.state(), eager.state(), **CLOSE)
    assert ours.log_alpha is kept
    assert type(kept) is torch.Tensor
    assert train.recompiles == []
    # Another tensor, with another optimizer's state: the step is captured again.
    for agent in (ours, eager):
        agent.log_alpha = torch.ones(1, requires_grad=True)
        agent.alpha_optimizer.param_groups[0]["params"] = [agent.log_alpha]
    for seed in range(2):
        torch.testing.assert_close(train(batch(seed)), eager.step(batch(seed)), **CLOSE)
        torch.testing.assert_close(ours.state(), eager.state(), **CLOSE)
    assert len(train.recompiles) == 1


def test_a_tensor_that_is_trained_alone() -> None:
    """As the image of style transfer and the delta of an adversarial attack."""

    def training() -> tuple[Any, torch.Tensor, nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Linear(4, 2).requires_grad_(requires_grad=False)
        image = torch.randn(3, 4, requires_grad=True)
        optimizer = torch.optim.SGD([image], lr=0.5, momentum=0.9)

        def step() -> float:
            optimizer.zero_grad()
            loss = model(image).square().mean()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                image.clamp_(-1, 1)
            return loss.item()

        return step, image, model, optimizer

    step, ours, model, optimizer = training()
    eager, theirs, *_ = training()
    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    for _ in range(5):
        torch.testing.assert_close(train(), eager(), **CLOSE)
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_verify_puts_it_back() -> None:
    agent = Agent()
    agent.step(batch(0))
    before = [one.clone() for one in agent.state()]
    optimizers = [agent.optimizer, agent.alpha_optimizer]
    report = amp_ir.verify(agent.step, (batch(1),), model=agent.actor, optimizer=optimizers)
    assert "model1.tensor0" in str(report.to_json())
    assert all(map(torch.equal, before, agent.state()))


def test_ranks_refuse_it() -> None:
    told = (
        "1 of the parameters of the optimizers are tensors in no model, whose gradients the ranks "
        "would not exchange. Make each a parameter, p = torch.nn.Parameter(p), before its "
        "optimizer is made, and pass model=[model, torch.nn.ParameterList([p])]"
    )
    with pytest.raises(ArgumentError, match=re.escape(told)):
        refuse_bare_tensors([nn.Linear(2, 2), BareTensors([torch.zeros(1, requires_grad=True)])])
