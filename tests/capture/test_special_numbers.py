# SPDX-License-Identifier: Apache-2.0
"""Numbers at which PyTorch computes something else, as they change between calls of a step."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir
from amp_ir.errors import CaptureError

Function = Callable[[torch.Tensor, float], torch.Tensor]
A, B = torch.randn(4, 3), torch.randn(3, 4)
BATCHES_A, BATCHES_B = torch.randn(2, 4, 3), torch.randn(2, 3, 4)


def not_finite() -> torch.Tensor:
    x = torch.randn(4, 4)
    x[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    x[1, 1], x[2, 2] = 0.0, -0.0
    return x


def assert_as_eager(function: Function, numbers: tuple[float, ...]) -> None:
    """The results and gradients of a step at each number are PyTorch's."""

    def step(x: torch.Tensor, number: float) -> tuple[torch.Tensor, ...]:
        x = x.detach().clone().requires_grad_()
        y = function(x, number)
        return y.detach(), *torch.autograd.grad(y, x, torch.ones_like(y), allow_unused=True)

    train = amp_ir.jit(step, model=nn.Linear(1, 1))
    x = not_finite()
    for number in numbers:
        for found, wanted in zip(train(x, number), step(x, number), strict=True):
            torch.testing.assert_close(found, wanted, equal_nan=True)


# The third number makes it an input of the step; what is special comes after.
@pytest.mark.parametrize(
    "function",
    [
        lambda x, k: torch.addmm(x, A, B, beta=k),
        lambda x, k: x.addmm(A, B, beta=k),
        lambda x, k: x.clone().addmm_(A, B, beta=k),
        lambda x, k: torch.addmm(B.T @ A.T, x, x, alpha=k),
        lambda x, k: torch.baddbmm(x.expand(2, 4, 4), BATCHES_A, BATCHES_B, beta=k),
        lambda x, k: torch.baddbmm(
            x.expand(2, 4, 4), x.expand(2, 4, 4), x.expand(2, 4, 4), alpha=k
        ),
        lambda x, k: torch.addbmm(x, BATCHES_A, BATCHES_B, beta=k),
        lambda x, k: torch.addbmm(A @ B, x.expand(2, 4, 4), x.expand(2, 4, 4), alpha=k),
        lambda x, k: torch.addmv(x[0], x[3:].T.expand(4, 4), A[:, 0], beta=k),
        lambda x, k: torch.addmv(A[:, 0], x, A[:, 1], alpha=k),
        lambda x, k: torch.addr(x, A[:, 0], A[:, 1], beta=k),
        lambda x, k: torch.addr(A @ B, x[0], A[:, 1], alpha=k),
    ],
)
def test_a_factor_that_becomes_zero(function: Function) -> None:
    assert_as_eager(function, (1.0, 0.5, 0.25, 0.0, 2.0, 0.0))


@pytest.mark.parametrize("function", [lambda x, k: x**k, lambda x, k: x.pow(exponent=k)])
def test_an_exponent_that_becomes_special(function: Function) -> None:
    """Only without gradients: ATen computes the exponent of a gradient, so that each compiles."""
    train = amp_ir.jit(lambda x, k: function(x, k), model=nn.Linear(1, 1))
    x = not_finite()
    for number in (1.5, 2.5, 3.5, 0.5, -0.5, 0.0, 1.25):
        torch.testing.assert_close(train(x, number), function(x, number), equal_nan=True)
    assert len(train.recompiles) == 5


@pytest.mark.parametrize("function", [torch.lerp, lambda x, k: x.clone().lerp_(x.flip(0), k)])
def test_a_weight_that_passes_half(function: Function) -> None:
    """At 1 PyTorch's lerp is its end bit by bit: a hard update of a target network."""
    ends = torch.full((4, 4), 0.1)

    def step(x: torch.Tensor, weight: float) -> torch.Tensor:
        return function(x, ends, weight) if function is torch.lerp else function(x, weight)

    train = amp_ir.jit(step, model=nn.Linear(1, 1))
    x = 1e8 * torch.randn(4, 4)
    for weight in (0.1, 0.2, 0.3, 1.0, 0.25, 0.75, 0.0):
        assert torch.equal(train(x, weight), step(x, weight))


def test_a_special_number_is_compiled_once() -> None:
    def step(x: torch.Tensor, beta: float) -> torch.Tensor:
        return torch.addmm(x, A, B, beta=beta)

    train = amp_ir.jit(step, model=nn.Linear(1, 1))
    for beta in (1.0, 0.5, 0.25, 0.0, 2.0, 0.0, 3.0, 0.0):
        train(torch.randn(4, 4), beta)
    # The second and third for numbers, the fourth for 0.
    assert len(train.recompiles) == 3


@pytest.mark.parametrize(
    ("function", "number"),
    [
        (F.leaky_relu, 0.0),
        (F.leaky_relu, -0.0),
        (F.elu, 0.0),
        (F.celu, math.inf),
        (lambda x, k: F.huber_loss(x, torch.zeros(4, 4), reduction="none", delta=k), math.inf),
        (lambda x, k: torch.addmm(A @ B, x, x, alpha=k), 0.0),
        (lambda x, k: F.scaled_dot_product_attention(A @ B, x, A @ B, scale=k), 0.0),
    ],
)
def test_a_constant_at_which_nothing_may_be_folded(function: Function, number: float) -> None:
    def step(x: torch.Tensor, cotangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().clone().requires_grad_()
        y = function(x, number)
        return y.detach(), *torch.autograd.grad(y, x, cotangent)

    x, cotangent = not_finite(), torch.ones(4, 4)
    if function in (F.elu, F.celu):
        x[0, 0] = 1.0  # at NaN, PyTorch's vectors and its single elements differ
    cotangent[3, 1:3] = torch.tensor([math.inf, math.nan])
    x[3] = -1.0
    results = amp_ir.jit(step, model=nn.Linear(1, 1))(x, cotangent)
    for found, wanted in zip(results, step(x, cotangent), strict=True):
        torch.testing.assert_close(found, wanted, equal_nan=True)


def specials() -> torch.Tensor:
    x = not_finite()
    x[3] = torch.tensor([-2.0, 0.25, 100.0, -25.0])
    return x


def steps_at(x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Three steps that descend a loss from special values are PyTorch's, gradients included."""

    def step(x: torch.Tensor, cotangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().clone().requires_grad_()
        y = function(x)
        (gradient,) = torch.autograd.grad(y, x, cotangent.expand(y.shape))
        return y.detach(), gradient, (x - 0.1 * gradient).detach()

    train = amp_ir.jit(step, model=nn.Linear(1, 1))
    for _ in range(3):
        results, wanted = train(x, torch.tensor(0.75)), step(x, torch.tensor(0.75))
        for found, other in zip(results, wanted, strict=True):
            torch.testing.assert_close(found, other, equal_nan=True, rtol=1e-5, atol=1e-6)
        x = wanted[2]


@pytest.mark.parametrize("beta", [0.0, -0.0, 1e-50, -1.0])
@pytest.mark.parametrize("threshold", [20.0, -1.0, 0.0])
def test_softplus_with_a_beta_of_zero_or_below(beta: float, threshold: float) -> None:
    steps_at(specials(), lambda x: F.softplus(x, beta, threshold))


# At NaN with eps, and at -0, PyTorch's vectors and its single elements differ: rows are short.
@pytest.mark.parametrize("eps", [None, 0.0, 0.1, 0.5, 0.6, 1.0, -1.0])
def test_the_gradient_of_logit_outside_of_its_range(eps: float | None) -> None:
    x = specials()
    x[2, 2] = 0.5
    steps_at(x, lambda x: torch.stack([torch.logit(row, eps) for row in x]))


@pytest.mark.parametrize("beta", [math.inf, 0.0, 1e-30])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_smooth_l1_with_a_beta_of_infinity(beta: float, reduction: str) -> None:
    target = torch.linspace(-1, 1, 16).reshape(4, 4)
    steps_at(specials(), lambda x: F.smooth_l1_loss(x, target, beta=beta, reduction=reduction))


@pytest.mark.parametrize("beta", [-1.0, math.nan])
def test_a_beta_that_smooth_l1_refuses(beta: float) -> None:
    train = amp_ir.jit(lambda x: F.smooth_l1_loss(x, 2 * x, beta=beta), model=nn.Linear(1, 1))
    with pytest.raises(CaptureError, match="does not support negative values for beta"):
        train(torch.ones(3))


def test_celu_with_an_alpha_below_zero() -> None:
    x = specials()
    x[0, 0] = 1.0  # as with elu
    steps_at(x, lambda x: F.celu(x, -1.5))


def test_distances_that_count_differences_have_a_gradient_of_zero() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 2.0], [0.0, 1.0]], requires_grad=True)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().clone().requires_grad_()
        distances = torch.cdist(x, x + 1, p=0.0), F.pdist(x, p=0.0)
        total = sum(one.sum() for one in distances)
        return *(one.detach() for one in distances), *torch.autograd.grad(total, x)

    results = amp_ir.jit(step, model=nn.Linear(1, 1))(x)
    for found, wanted in zip(results, step(x), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("is_right", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 33])
def test_boundaries_that_are_nan_or_not_sorted(*, count: int, is_right: bool) -> None:
    """What PyTorch finds among them depends on the way of its binary search."""
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(40, generator=generator)
    bounds = torch.randn(3, count, generator=generator)
    bounds[0] = bounds[0].sort().values
    bounds[0, count // 2 :] = math.nan
    bounds[1, 0] = math.nan

    def step(values: torch.Tensor, bounds: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.bucketize(values, row, right=is_right) for row in bounds]
        spread = values.expand(3, 40).contiguous()
        return [*rows, torch.searchsorted(bounds, spread, right=is_right)]

    found = amp_ir.jit(step, model=nn.Linear(1, 1))(values, bounds)
    for one, wanted in zip(found, step(values, bounds), strict=True):
        assert torch.equal(one, wanted)
