# SPDX-License-Identifier: Apache-2.0
"""Training steps whose products have one row, one column or one term, beside eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from compiled_steps import assert_compiled_alike
from step_comparison import Training


def attention(width: int, heads: int) -> Training:
    """Attention of sequences without a batch dimension."""
    model = nn.MultiheadAttention(width, heads, batch_first=True)
    return _training(model, lambda x: model(x, x, x, need_weights=False)[0].pow(2).mean())


def gradient_penalty(inputs: int, outputs: int) -> Training:
    model = nn.Linear(inputs, outputs)

    def loss(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        found = model(x).tanh().sum()
        (gradient,) = torch.autograd.grad(found, x, create_graph=True)
        return (gradient.norm(2, 1) - 1).pow(2).mean()

    return _training(model, loss)


def physics() -> Training:
    """A PINN: the residual of u'' + u = 0."""
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        u = model(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        return (second + u).pow(2).mean()

    return _training(model, loss)


def meta_learning() -> Training:
    """MAML: a loss after one step of the weights."""
    model = nn.Linear(4, 1)

    def loss(x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.linear(x, model.weight, model.bias).pow(2).mean()
        steps = torch.autograd.grad(inner, list(model.parameters()), create_graph=True)
        weight, bias = (p - 0.1 * g for p, g in zip(model.parameters(), steps, strict=True))
        return (nn.functional.linear(x, weight, bias) - 1).pow(2).mean()

    return _training(model, loss)


class _Experts(nn.Module):
    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.gate = nn.Linear(inputs, experts)
        self.w = nn.Parameter(torch.randn(experts, inputs, outputs) / inputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        each = torch.einsum("bi,eio->beo", x, self.w)
        return torch.einsum("be,beo->bo", self.gate(x).softmax(-1), each)


def experts(count: int, inputs: int, outputs: int) -> Training:
    model = _Experts(count, inputs, outputs)
    return _training(model, lambda x: model(x).pow(2).mean())


def _training(model: nn.Module, loss: Callable[[torch.Tensor], torch.Tensor]) -> Training:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        found = loss(x)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        return found.detach()

    return Training(model, optimizer, step)


PROGRAMS: dict[str, tuple[Callable[[], Training], tuple[int, ...]]] = {
    "attention of width 1": (lambda: attention(1, 1), (8, 1)),
    "attention of one token": (lambda: attention(4, 2), (2, 1, 4)),
    "gradient penalty": (lambda: gradient_penalty(8, 1), (8, 8)),
    "gradient penalty of one sample": (lambda: gradient_penalty(8, 1), (1, 8)),
    "gradient penalty of one input": (lambda: gradient_penalty(1, 8), (8, 1)),
    "physics": (physics, (16, 1)),
    "physics at one point": (physics, (1, 1)),
    "meta learning": (meta_learning, (8, 4)),
    "experts": (lambda: experts(3, 4, 5), (6, 4)),
    "one expert": (lambda: experts(1, 4, 5), (6, 4)),
    "experts of one output": (lambda: experts(3, 4, 1), (1, 4)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_steps_are_as_in_eager_pytorch(name: str) -> None:
    build, dims = PROGRAMS[name]

    def batch(index: int) -> tuple[Any, ...]:
        torch.manual_seed(index)
        return (torch.randn(dims),)

    assert_compiled_alike(build, batch)
