# SPDX-License-Identifier: Apache-2.0
"""Python values that a user's optimizer keeps: counters are refused, settings are guarded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import amp_ir
from amp_ir.errors import CaptureError
from square_steps import square_step

X = torch.ones(3, 4)
ADVICE = (
    "A compiled step changes tensors only: let the optimizer keep it as a tensor of its state "
    "(state[parameter]['step'], as PyTorch's do), or set it between two steps"
)


class Decaying(torch.optim.Optimizer):
    """SGD whose rate falls with its own count, as `count(self, group)` keeps that."""

    def __init__(self, parameters, count):
        super().__init__(parameters, {"lr": 0.01})
        self.count, self.steps, self.log, self.config = count, 0, [], {"steps": 0}
        self.scale = None

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            number = self.count(self, group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * (group["lr"] / number))


def in_attribute(optimizer, _group):
    optimizer.steps += 1
    return optimizer.steps


def in_list(optimizer, _group):
    optimizer.log.append(1)
    return len(optimizer.log)


def in_dict(optimizer, _group):
    optimizer.config["steps"] += 1
    return optimizer.config["steps"]


def in_state(optimizer, _group):
    optimizer.state["steps"] = optimizer.state.get("steps", 0) + 1
    return optimizer.state["steps"]


def in_defaults(optimizer, _group):
    optimizer.defaults["steps"] = optimizer.defaults.get("steps", 0) + 1
    return optimizer.defaults["steps"]


def in_group(_optimizer, group):
    group["steps"] = group.get("steps", 0) + 1
    return group["steps"]


def in_tensor(optimizer, _group):
    first = optimizer.param_groups[0]["params"][0]
    if "steps" not in optimizer.state[first]:
        optimizer.state[first]["steps"] = torch.zeros(())
    optimizer.state[first]["steps"] += 1
    return optimizer.state[first]["steps"]


def set_once(optimizer, _group):
    if optimizer.scale is None:
        optimizer.scale = 2.0
    return optimizer.scale


def training(count):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = Decaying(model.parameters(), count)
    return model, optimizer, square_step(model, optimizer)


def losses(step, count=4):
    return torch.stack([step(X) for _ in range(count)])


COUNTERS = {
    in_attribute: "changes 'steps' of optimizer 0 (Decaying), which was 0 and becomes 1",
    in_list: "changes 'log' of optimizer 0 (Decaying)",
    in_dict: "changes 'steps' of 'config' of optimizer 0 (Decaying), which was 0 and becomes 1",
    in_state: "changes 'steps' of the state of optimizer 0 (Decaying), which was absent and "
    "becomes 1",
    in_defaults: "changes 'steps' of the defaults of optimizer 0 (Decaying), which was absent and "
    "becomes 1",
    in_group: "changes 'steps' of param group 0 of optimizer 0 (Decaying), which was absent and "
    "becomes 1",
}


@pytest.mark.parametrize("count", COUNTERS, ids=lambda one: one.__name__)
def test_a_counter_in_python_is_refused_and_put_back(count):
    model, optimizer, step = training(count)
    with pytest.raises(CaptureError) as caught:
        amp_ir.jit(step, model=model, optimizer=optimizer)(X)
    assert str(caught.value) == (
        f"this step cannot be captured, 1 place:\n  1. step (forward): {COUNTERS[count]}. {ADVICE}"
    )
    assert (optimizer.steps, optimizer.log, optimizer.config) == (0, [], {"steps": 0})
    assert "steps" not in optimizer.param_groups[0] and "steps" not in optimizer.state
    # Nothing has changed: it trains as before.
    other, _, expected = training(count)
    torch.testing.assert_close(losses(step), losses(expected), rtol=0, atol=0)


@pytest.mark.parametrize("count", [in_tensor, set_once])
def test_what_the_error_advises_and_what_is_set_once_train_as_in_eager(count):
    model, optimizer, step = training(count)
    _, eager, expected = training(count)
    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    # A few sums of float32 in another order.
    torch.testing.assert_close(losses(train), losses(expected), rtol=1e-5, atol=1e-6)
    assert optimizer.scale == eager.scale


def test_an_attribute_that_the_user_sets_compiles_again():
    def by_attribute(optimizer, _group):
        return optimizer.steps + 1

    model, optimizer, step = training(by_attribute)
    _, eager, expected = training(by_attribute)
    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    for number in (0, 0, 3, 3):
        optimizer.steps = eager.steps = number
        torch.testing.assert_close(losses(train, 1), losses(expected, 1), rtol=1e-5, atol=1e-6)
    assert [one.reason for one in train.recompiles] == [
        "'steps' of optimizer 0 (Decaying) was 0 and is 3"
    ]


def momentum_in_attribute(optimizer, gradient):
    before = getattr(optimizer, "momentum", None)
    optimizer.momentum = gradient.sum() if before is None else before * 0.9 + gradient.sum()


def momentum_in_dict(optimizer, gradient):
    optimizer.config["momentum"] = gradient + optimizer.config.get("momentum", 0.0)


def gradients_in_list(optimizer, gradient):
    optimizer.log.append(gradient.clone())


@pytest.mark.parametrize(
    ("keep", "where"),
    [
        (momentum_in_attribute, "'momentum' of optimizer 0 (Decaying)"),
        (momentum_in_dict, "'momentum' of 'config' of optimizer 0 (Decaying)"),
        (gradients_in_list, "'log' of optimizer 0 (Decaying)"),
    ],
)
def test_tensors_beside_the_state_of_parameters_are_refused(keep, where):
    def kept(optimizer, group):
        keep(optimizer, group["params"][1].grad)
        return 1

    model, optimizer, step = training(kept)
    with pytest.raises(CaptureError) as caught:
        amp_ir.jit(step, model=model, optimizer=optimizer)(X)
    shape = "()" if keep is momentum_in_attribute else "(1,)"
    assert str(caught.value) == (
        f"this step cannot be captured, 1 place:\n  1. step (forward): keeps a tensor of shape "
        f"{shape} in {where}, where a compiled step puts none. {ADVICE}"
    )
    assert not hasattr(optimizer, "momentum")
    assert (optimizer.log, optimizer.config) == ([], {"steps": 0})


def halve_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad.mul_(0.5)


def own_hook(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    return optimizer.register_step_pre_hook(halve_gradients).remove


def hook_of_all(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    return register_optimizer_step_pre_hook(halve_gradients).remove


def own_step(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    whole = optimizer.step

    def halved() -> None:
        halve_gradients(optimizer)
        whole()

    optimizer.step = halved  # type: ignore[method-assign]
    return lambda: delattr(optimizer, "step")


class Halving(torch.optim.SGD):
    """An optimizer of the user's, whose class may change."""


def step_of_the_class(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    whole = Halving.step

    def halved(self: torch.optim.Optimizer) -> None:
        halve_gradients(self)
        whole(self)

    Halving.step = halved  # type: ignore[method-assign, assignment]
    return lambda: setattr(Halving, "step", whole)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (own_hook, "optimizer 0 has other step pre-hooks: 0 then, 1 now"),
        (hook_of_all, "optimizer 0 has other step hooks, of all optimizers: 0 then, 1 now"),
        (own_step, "step of optimizer 0 was replaced"),
        (step_of_the_class, "step of optimizer 0 was replaced"),
    ],
)
def test_what_runs_around_an_optimizers_step_compiles_again(change: Any, reason: str) -> None:
    """It comes after the second call, and goes after the fourth."""
    trained = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = Halving(model.parameters(), lr=0.1)
        step = square_step(model, optimizer)
        train = amp_ir.jit(step, model=model, optimizer=optimizer) if is_compiled else step
        undo = None
        for k in range(6):
            if k == 2:
                undo = change(optimizer)
            if k == 4 and undo is not None:
                undo()
            train(torch.full((2, 4), 0.5 + k))
        trained.append(model.weight.detach().clone())
    torch.testing.assert_close(*trained)
    assert [one.reason for one in train.recompiles] == [reason]


def test_a_scheduler_that_comes_later_compiles_nothing() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = amp_ir.jit(square_step(model, optimizer), model=model, optimizer=optimizer)
    train(torch.ones(2, 4))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(2):
        train(torch.ones(2, 4))
        scheduler.step()
    assert train.recompiles == []


def test_an_entry_that_a_loaded_state_lacks_compiles_again() -> None:
    trained = []
    for is_compiled in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = optimizer.state_dict()
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # keeps its `initial_lr` there
        step = square_step(model, optimizer)
        train = amp_ir.jit(step, model=model, optimizer=optimizer) if is_compiled else step
        train(torch.ones(2, 4))
        optimizer.load_state_dict(before)
        train(torch.ones(2, 4))
        if is_compiled:
            reasons = [one.reason for one in train.recompiles]
        trained.append(model.weight.detach().clone())
    torch.testing.assert_close(*trained)
    assert reasons == ["optimizer0.group0.initial_lr was removed"]
