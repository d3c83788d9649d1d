# SPDX-License-Identifier: Apache-2.0
"""`copy.deepcopy` in a step: of a model, for an inner loop, and of a tensor from outside."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import amp_ir

TIGHT: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6}  # float32 sums of few terms, over four steps


def batch(k: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(k))


def test_an_inner_copy_has_no_gradients_and_buffers_of_its_own() -> None:
    """PyTorch's warning of data pointers would be an error here."""
    results = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
        model[2].weight = model[0].weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> Any:
            model(x).sin().mean().backward()  # noqa: B023
            inner = copy.deepcopy(model)  # noqa: B023
            assert inner[2].weight is inner[0].weight and inner[0].weight.grad is None
            gradients = torch.autograd.grad(inner(x).cos().mean(), list(inner.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(inner.parameters(), gradients, strict=True):
                    parameter -= 0.1 * gradient
            loss = inner(x).square().mean()
            loss.backward()
            for parameter, other in zip(model.parameters(), inner.parameters(), strict=True):  # noqa: B023
                parameter.grad = other.grad
            optimizer.step()  # noqa: B023
            optimizer.zero_grad()  # noqa: B023
            return loss.detach(), inner[1].running_mean

        train = amp_ir.jit(step, model=model, optimizer=optimizer) if is_compiled else step
        results.append([[train(batch(k)) for k in range(4)], model.state_dict()])
    torch.testing.assert_close(results[1], results[0], **TIGHT)


def test_a_copied_tensor_from_outside_is_read_at_every_call() -> None:
    model, scale = nn.Linear(4, 2), torch.ones(2)

    def step(x: torch.Tensor) -> torch.Tensor:
        own = copy.deepcopy(scale)
        own += 1
        return (model(x).detach() * own).sum()

    train = amp_ir.jit(step, model=model)
    for k in range(3):
        torch.testing.assert_close(train(batch(k)), step(batch(k)), **TIGHT)
        scale.mul_(3)
    assert not train.recompiles
