# SPDX-License-Identifier: Apache-2.0
"""Recipes from the wild under a loss scale: right ones pass, and scale; wrong ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import amp_ir
from amp_ir.errors import LossScaleError
from scaled_training import Training, count_growing, line_of

Recipe = Callable[[Training, torch.Tensor, torch.Tensor], Any]


def gradients_of(t: Training) -> list[torch.Tensor]:
    return [parameter.grad for parameter in t.model.parameters() if parameter.grad is not None]


def wasserstein(t: Training, x: torch.Tensor, y: torch.Tensor, *, unscaled: bool = True) -> Any:
    """WGAN-GP (Gulrajani et al. 2017): the norm of an input's gradient is held at 1."""
    t.optimizer.zero_grad()
    between = (0.3 * x + 0.7 * x.flip(0)).detach().requires_grad_(True)
    (grad,) = torch.autograd.grad(
        t.scaler.scale(t.model(between).sum()), between, create_graph=True
    )
    if unscaled:
        grad = grad * (1.0 / t.scaler.get_scale())
    penalty = ((grad.norm(2, dim=1) - 1) ** 2).mean()  # subtract
    loss = t.loss(x, y) + 10 * penalty
    t.scaler.scale(loss).backward()
    t.end()
    return loss.detach()


def adaptive_clipping(t: Training, x: torch.Tensor, y: torch.Tensor) -> None:
    """Brock et al. 2021: a threshold for each tensor, from its parameter's norm."""
    t.scaled_backward(x, y)
    t.scaler.unscale_(t.optimizer)
    clip_adaptively(t)
    t.end()


def clip_adaptively(t: Training) -> None:
    for parameter, grad in zip(t.model.parameters(), gradients_of(t), strict=True):
        most, norm = parameter.detach().norm().clamp(min=1e-3) * 0.01, grad.norm()
        grad.copy_(torch.where(norm > most, grad * (most / norm.clamp(min=1e-6)), grad))  # greater


def early_adaptive_clipping(t: Training, x: torch.Tensor, y: torch.Tensor) -> None:
    t.scaled_backward(x, y)
    clip_adaptively(t)
    t.end()


def centralized(t: Training, x: torch.Tensor, y: torch.Tensor) -> None:
    """Yong et al. 2020; linear, so it may come before unscale_."""
    t.scaled_backward(x, y)
    for grad in gradients_of(t):
        if grad.dim() > 1:
            grad.sub_(grad.mean(1, keepdim=True))
    t.end()


def decayed_in_the_loss(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    t.optimizer.zero_grad()
    loss = t.loss(x, y) + 0.01 * sum(p.square().sum() for p in t.model.parameters())
    t.scaler.scale(loss).backward()
    t.end()
    return loss.detach()


def decayed_by_hand(t: Training, x: torch.Tensor, y: torch.Tensor) -> None:
    t.scaled_backward(x, y)
    for parameter, grad in zip(t.model.parameters(), gradients_of(t), strict=True):
        grad.add_(parameter.detach(), alpha=0.01)  # add
    t.end()


def noisy(t: Training, x: torch.Tensor, y: torch.Tensor) -> None:
    """Gradient noise (Neelakantan et al. 2015), on gradients that are still scaled."""
    t.scaled_backward(x, y)
    for grad in gradients_of(t):
        grad.add_(torch.randn_like(grad) * 0.01)  # add
    t.end()


def of_signs(t: Training, x: torch.Tensor, y: torch.Tensor) -> None:
    """Signs do not depend on the scale, so nothing needs to be unscaled."""
    t.scaled_backward(x, y)
    for grad in gradients_of(t):
        grad.sign_()
    t.optimizer.step()


def of_norm_one(t: Training, x: torch.Tensor, y: torch.Tensor) -> None:
    t.scaled_backward(x, y)
    for grad in gradients_of(t):
        grad.div_(grad.norm())
    t.optimizer.step()


def clipped_by_largest(t: Training, x: torch.Tensor, y: torch.Tensor) -> None:
    t.scaled_backward(x, y)
    t.scaler.unscale_(t.optimizer)
    nn.utils.clip_grad_norm_(t.model.parameters(), 0.1, norm_type=float("inf"))
    t.end()


def clipped_by_cubes(t: Training, x: torch.Tensor, y: torch.Tensor) -> None:
    t.scaled_backward(x, y)
    t.scaler.unscale_(t.optimizer)
    nn.utils.clip_grad_norm_(t.model.parameters(), 0.1, norm_type=3.0)
    t.end()


def norm_for_reading(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    t.scaled_backward(x, y)
    norm = nn.utils.get_total_norm(gradients_of(t)) / t.scaler.get_scale()
    t.end()
    return norm


def several_at_once(t: Training, x: torch.Tensor, y: torch.Tensor) -> None:
    t.optimizer.zero_grad()
    out = t.model(x)
    losses = [functional.cross_entropy(out, y), out.square().mean()]
    torch.autograd.backward(t.scaler.scale(losses))
    t.end()


def in_a_block(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    """The loop of apex and MXNet users."""
    t.optimizer.zero_grad()
    loss = t.loss(x, y)
    with amp_ir.scale_loss(loss, t.optimizer) as scaled:
        scaled.backward()
    t.clip(1.0)
    t.optimizer.step()
    return loss.detach()


RIGHT: list[Recipe] = [
    in_a_block,
    wasserstein,
    adaptive_clipping,
    centralized,
    decayed_in_the_loss,
    of_signs,
    of_norm_one,
    clipped_by_largest,
    clipped_by_cubes,
    norm_for_reading,
    several_at_once,
]


@pytest.mark.parametrize("recipe", RIGHT)
def test_a_right_recipe_passes_and_every_value_grows_by_its_degree(recipe: Recipe):
    training = Training.make(torch.optim.SGD, lr=0.1)
    assert training.degrees(recipe).notes == ()
    checked, unknown = count_growing(training, recipe)
    assert unknown <= 5 and checked > 40


def clipped_in_the_block(t: Training, x: torch.Tensor, y: torch.Tensor) -> None:
    t.optimizer.zero_grad()
    with amp_ir.scale_loss(t.loss(x, y), t.optimizer) as scaled:
        scaled.backward()
        nn.utils.clip_grad_norm_(t.model.parameters(), 1.0)  # minimum
    t.optimizer.step()


def test_clipping_belongs_behind_the_block():
    with pytest.raises(LossScaleError) as error:
        Training.make(torch.optim.SGD, lr=0.1).degrees(clipped_in_the_block)
    (line,) = str(error.value).splitlines()[1:]
    assert f"(optimizer), {line_of(clipped_in_the_block, 'minimum')}: relax.minimum" in line
    assert line.endswith("or move the line after the block of amp_ir.scale_loss")


def wrong_wasserstein(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    return wasserstein(t, x, y, unscaled=False)


@pytest.mark.parametrize(
    ("recipe", "within", "mark"),
    [
        (wrong_wasserstein, wasserstein, "subtract"),
        (early_adaptive_clipping, clip_adaptively, "greater"),
        (decayed_by_hand, decayed_by_hand, "add"),
        (noisy, noisy, "add"),
    ],
)
def test_a_wrong_recipe_is_refused_at_its_line(recipe: Recipe, within: Any, mark: str):
    with pytest.raises(LossScaleError) as error:
        Training.make(torch.optim.SGD, lr=0.1).degrees(recipe)
    (line,) = str(error.value).splitlines()[1:]
    assert line.startswith(f"  1. step (forward), {line_of(within, mark)}: relax.{mark} ")
    assert "for the .grad of parameters call scaler.unscale_(optimizer)" in line
