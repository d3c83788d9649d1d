# SPDX-License-Identifier: Apache-2.0
"""The requires_grad in which a step leaves parameters: a compiled step leaves it too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import amp_ir


def freezes_at_its_end(model: nn.Module, update: Any) -> Any:
    """The second call trains without the first layer."""

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = update(x)
        model[0].requires_grad_(False)
        return loss

    return step


def freezes_first(model: nn.Module, update: Any) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        model[0].requires_grad_(False)
        return update(x)

    return step


def sets_before_each_phase(model: nn.Module, update: Any) -> Any:
    """As the steps of many GANs do."""

    def step(x: torch.Tensor) -> torch.Tensor:
        model[0].requires_grad_(True)
        loss = update(x)
        model[0].requires_grad_(False)
        return loss + update(x)

    return step


def puts_back(model: nn.Module, update: Any) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        model[0].requires_grad_(False)
        loss = update(x)
        model[0].requires_grad_(True)
        return loss

    return step


def inverts(model: nn.Module, update: Any) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = update(x)
        for one in model[0].parameters():
            one.requires_grad = not one.requires_grad
        return loss

    return step


def training(kind: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def update(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, kind(model, update)


def flags(model: nn.Module) -> list[bool]:
    return [one.requires_grad for one in model.parameters()]


FROZEN = "parameter 0.weight was trained and is frozen"


@pytest.mark.parametrize(
    ("kind", "reasons"),
    [
        (freezes_at_its_end, [FROZEN]),
        (freezes_first, []),
        (sets_before_each_phase, []),
        (puts_back, []),
        (inverts, [FROZEN]),
    ],
)
def test_flags_are_left_as_in_eager(kind: Any, reasons: list[str]) -> None:
    ours, optimizer, step = training(kind)
    theirs, _, eager = training(kind)
    train = amp_ir.jit(step, model=ours, optimizer=optimizer)
    for k in range(6):
        if k == 4:
            for model in (ours, theirs):
                model.requires_grad_(True)
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(k))
        # Eight rows in float32, summed in another order.
        torch.testing.assert_close(train(x), eager(x), msg=f"call {k}")
        assert flags(ours) == flags(theirs), k
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other)
    assert [one.reason for one in train.recompiles] == reasons


def test_a_compiled_step_goes_on_where_it_is_the_same_step_with_the_flags_that_it_leaves() -> None:
    x = torch.linspace(-1, 1, 32).reshape(8, 4)
    for kind, is_same in ((sets_before_each_phase, True), (freezes_at_its_end, False)):
        model, optimizer, step = training(kind)
        mod, _ = amp_ir.trace_step(step, (x,), model=model, optimizer=optimizer)
        assert flags(model) == [True] * 4
        compiled = amp_ir.compile(mod)
        compiled(x)
        assert flags(model) == [False, False, True, True]
        if is_same:
            compiled(x)
            # A mixture may be another step.
            model[0].bias.requires_grad_(True)
        with pytest.raises(amp_ir.errors.StateError) as refused:
            compiled(x)
        assert str(refused.value) == (
            f"the step is no longer as it was captured: {FROZEN}. Call amp_ir.trace_step and "
            "amp_ir.compile again, or use amp_ir.jit, which does"
        )
