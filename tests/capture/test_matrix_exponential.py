# SPDX-License-Identifier: Apache-2.0
"""The matrix exponential: its gradient is linear, also where it was multiplied by a loss scale."""

from __future__ import annotations

import pytest
import torch

import amp_ir
from amp_ir.capture.decompositions.matrix_exponential import matrix_exp


def _model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(8, 9)


def _loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.matrix_exp(model(x).unflatten(-1, (3, 3))).square().mean()


@pytest.mark.parametrize("scale", [1.0, 2.0**16, 2.0**24])
def test_a_step_under_a_loss_scale_has_the_gradient_of_float64(scale: float):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    model, exact = _model(), _model().double()
    before = [one.detach().clone() for one in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = amp_ir.GradScaler(init_scale=scale)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = _loss(model, x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    train = amp_ir.jit(step, model=model, optimizer=optimizer, scaler=scaler, amp_dtype="float32")
    train(x)
    _loss(exact, x.double()).backward()
    for old, new, other in zip(before, model.parameters(), exact.parameters(), strict=True):
        # PyTorch's own is 1e-4 off at 65536, and 3e-2 at 2^24.
        assert ((old - new) - other.grad).norm() < 2e-6 * other.grad.norm()


def test_an_infinite_gradient_stays_infinite_or_nan_so_that_a_step_is_skipped():
    matrix = torch.randn(2, 3, 3, requires_grad=True)
    above = torch.randn(2, 3, 3)
    above[0, 1, 2] = torch.inf
    (made,) = torch.autograd.grad(matrix_exp(matrix), matrix, above)
    assert not made[0].isfinite().any()
    (other,) = torch.autograd.grad(torch.matrix_exp(matrix), matrix, above)
    torch.testing.assert_close(made[1], other[1])


@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-30, 1.0, 1e30])
def test_gradients_of_every_size_are_pytorchs(size: float):
    matrix = torch.randn(5, 3, 3, dtype=torch.float64, requires_grad=True)
    above = torch.randn(5, 3, 3, dtype=torch.float64)
    (expected,) = torch.autograd.grad(torch.matrix_exp(matrix), matrix, above)
    narrow = matrix.detach().float().requires_grad_()
    (made,) = torch.autograd.grad(matrix_exp(narrow), narrow, above.float() * size)
    least = 2.0**-149 * 4  # a few units of a subnormal number
    torch.testing.assert_close(made, (expected * size).float(), rtol=1e-4, atol=least)


def test_a_gradient_of_the_gradient_is_pytorchs():
    matrix = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(matrix_exp, matrix)
    model = _model()

    def step(x: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad(_loss(model, x), model.weight, create_graph=True)
        penalty = grad.square().sum()
        penalty.backward()
        return penalty.detach()

    x = torch.randn(4, 8)
    got = amp_ir.jit(step, model=model, amp_dtype="float32")(x)
    ours, model.weight.grad = model.weight.grad, None
    torch.testing.assert_close(got, step(x))
    torch.testing.assert_close(ours, model.weight.grad, rtol=1e-4, atol=1e-6)
