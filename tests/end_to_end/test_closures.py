# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose `step` calls a closure, and those around another one, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amp_ir
from amp_ir.errors import CaptureError

X, Y = torch.linspace(-1, 1, 30).reshape(5, 6), torch.linspace(1, -1, 15).reshape(5, 3)
Loss = Callable[[], torch.Tensor]


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization as people copy it: it has the groups of the one inside."""

    def __init__(self, parameters: Any, *, lr: float) -> None:
        super().__init__(parameters, {"rho": 0.05, "lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.base.param_groups

    def _all(self) -> list[tuple[dict[str, Any], torch.Tensor]]:
        return [(group, one) for group in self.param_groups for one in group["params"]]

    @torch.no_grad()
    def first_step(self) -> None:
        norm = torch.stack([one.grad.norm() for _, one in self._all() if one.grad is not None])
        for group, one in self._all():
            self.state[one]["old"] = one.data.clone()
            one.add_(one.grad * (group["rho"] / (norm.norm() + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for _, one in self._all():
            one.data = self.state[one]["old"]
        self.base.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Loss | None = None) -> torch.Tensor:  # type: ignore[override]
        assert closure is not None
        self.first_step()
        with torch.enable_grad():
            loss = closure()
        self.second_step()
        return loss


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def by_closure(model: nn.Module, optimizer: Any) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure=closure).detach()

    return step


def by_sam(model: nn.Module, optimizer: Sam) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.first_step()
        F.mse_loss(model(x), y).backward()
        optimizer.second_step()
        return loss.detach()

    return step


def by_sam_with_closure(model: nn.Module, optimizer: Sam) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def loss_of() -> torch.Tensor:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        loss = loss_of()
        optimizer.step(loss_of)
        return loss.detach()

    return step


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW], ids=["SGD", "AdamW"])
def test_a_closure_is_forward_and_backward_whoever_calls_it(kind: Any) -> None:
    models = network(), network()
    ours, eager = (kind(one.parameters(), lr=0.05) for one in models)
    train = amp_ir.jit(by_closure(models[0], ours), model=models[0], optimizer=ours)
    step = by_closure(models[1], eager)
    for _ in range(3):
        torch.testing.assert_close(train(X, Y), step(X, Y).detach())
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict())
    mod, _ = amp_ir.trace_step(by_closure(models[0], ours), (X, Y), model=models[0], optimizer=ours)
    plan = amp_ir.autocast(mod, amp_dtype="bfloat16").plan
    phases = [one.phase for one in plan.ops if one.name == "relax.matmul"]
    assert phases == ["forward"] * 2 + ["backward"] * 3


@pytest.mark.parametrize("make", [by_sam, by_sam_with_closure])
def test_an_optimizer_that_shares_its_groups_with_the_one_inside(make: Any) -> None:
    models = network(), network()
    ours, eager = (Sam(one.parameters(), lr=0.05) for one in models)
    with pytest.raises(CaptureError) as refused:
        amp_ir.jit(make(models[0], ours), model=models[0], optimizer=ours)(X, Y)
    assert str(refused.value).endswith(
        ": SGD.step of an optimizer that was not passed is called. Pass it in optimizer=, or a "
        "list of all that the step calls. One that the step makes has no state to pass: write its "
        "update, p - lr * g, with torch.autograd.grad and torch.func.functional_call"
    )
    both = [ours, ours.base]
    train = amp_ir.jit(make(models[0], ours), model=models[0], optimizer=both)
    step = make(models[1], eager)
    for _ in range(3):
        torch.testing.assert_close(train(X, Y), step(X, Y))
        for one in (ours, eager):
            one.param_groups[0]["lr"] *= 0.5
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict())
    # The first step made state; a new learning rate compiles nothing.
    assert len(train.recompiles) == 1 and ours.param_groups is ours.base.param_groups


def test_a_base_of_an_orthogonal_weight_may_be_transposed() -> None:
    model = nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train = amp_ir.jit(by_closure(model, optimizer), model=model, optimizer=optimizer)
    assert any(not one.is_contiguous() for one in model.buffers())
    loss = F.mse_loss(model(X), Y).detach()
    torch.testing.assert_close(train(X, Y), loss)
    weight: torch.Tensor = model[0].weight  # type: ignore[assignment]
    torch.testing.assert_close((weight @ weight.T).detach(), torch.eye(6))
