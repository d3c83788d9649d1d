# SPDX-License-Identifier: Apache-2.0
"""Python values beside tensors and in PyTorch's optimizers, which a step reads and users change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir import errors

X = torch.linspace(-1, 1, 8).view(2, 4)


class Own(torch.optim.Optimizer):
    """An optimizer of the user's, which reads Python values of its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                k = self.state[parameter].get("k", 1.0)
                parameter.sub_(parameter.grad * group["lr"] * k)


class Run:
    """A model, an optimizer with a momentum and a tensor outside of both, with values beside."""

    def __init__(self, *, is_own: bool, by_text: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3)
        self.model.register_buffer("shift", torch.ones(3))
        self.outside = torch.ones(3)
        parameters = self.model.parameters()
        self.optimizer: Any = Own(parameters) if is_own else torch.optim.SGD(parameters, 0.1, 0.9)
        for one in (self.model.weight, self.model.shift, self.outside, self.optimizer):
            one.factor = 1.0
        for parameter in self.model.parameters():
            self.optimizer.state[parameter]["k"] = 1.0
        if by_text:
            self.optimizer.state["all"] = {"k": 1.0, "scale": torch.ones(())}
        self.optimizer.defaults["factors"] = [1.0]


Read = Callable[[Run], Any]
Change = Callable[[Run], object]


def stored(find: Callable[[Run], Any], key: Any, value: Any) -> Change:
    return lambda run: find(run).__setitem__(key, value)


CHANGES: dict[str, tuple[Read, Change, str]] = {
    "parameter": (
        lambda run: run.model.weight.factor,
        lambda run: setattr(run.model.weight, "factor", 3.0),
        "factor of weight was 1.0 and is 3.0",
    ),
    "buffer": (
        lambda run: run.model.shift.factor,
        lambda run: setattr(run.model.shift, "factor", 3.0),
        "factor of shift was 1.0 and is 3.0",
    ),
    "outside": (
        lambda run: run.outside * run.outside.factor,
        lambda run: setattr(run.outside, "factor", 3.0),
        "factor of ",
    ),
    "added": (
        lambda run: getattr(run.model.bias, "other", 1.0),
        lambda run: setattr(run.model.bias, "other", 3.0),
        "other of bias was absent and is 3.0",
    ),
    "optimizer": (
        lambda run: run.optimizer.factor,
        lambda run: setattr(run.optimizer, "factor", 3.0),
        "factor of optimizer 0 was 1.0 and is 3.0",
    ),
    "defaults": (
        lambda run: run.optimizer.defaults["factors"][0],
        stored(lambda run: run.optimizer.defaults["factors"], 0, 3.0),
        "factors[0] of the defaults of optimizer 0 was 1.0 and is 3.0",
    ),
    "state": (
        lambda run: run.optimizer.state[run.model.weight]["k"],
        stored(lambda run: run.optimizer.state[run.model.weight], "k", 3.0),
        "k of the state of weight in optimizer 0 was 1.0 and is 3.0",
    ),
    "state by text": (
        lambda run: run.optimizer.state["all"]["k"],
        stored(lambda run: run.optimizer.state["all"], "k", 3.0),
        "k of the state of 'all' in optimizer 0 was 1.0 and is 3.0",
    ),
    "tensor by text": (
        lambda run: run.optimizer.state["all"]["scale"],
        stored(lambda run: run.optimizer.state["all"], "scale", torch.tensor(3.0)),
        "scale of the state of 'all' in optimizer 0 was a tensor of shape () and is another one",
    ),
}


def trained(
    read: Read, change: Change, *, is_compiled: bool, is_own: bool = False, by_text: bool = False
) -> tuple[list[Any], list[str]]:
    """Return losses and parameters of four steps, with a change after two, and the reasons."""
    run = Run(is_own=is_own, by_text=by_text)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (run.model(x).square() * read(run)).mean()
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss.detach()

    train = amp_ir.jit(step, model=run.model, optimizer=run.optimizer)
    losses = []
    for k in range(4):
        if k == 2:
            change(run)
        losses.append((train if is_compiled else step)(X))
    reasons = [one.reason for one in train.recompiles]
    return [*losses, *(one.detach() for one in run.model.parameters())], reasons


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_value_compiles_again(name: str) -> None:
    read, change, reason = CHANGES[name]
    by_text = name.endswith("by text")
    ours, reasons = trained(read, change, is_compiled=True, by_text=by_text)
    theirs, _ = trained(read, change, is_compiled=False, by_text=by_text)
    torch.testing.assert_close(ours, theirs)
    assert reasons[-1].startswith(reason)


def test_a_value_in_the_state_of_an_own_optimizer_compiles_again() -> None:
    _, change, reason = CHANGES["state"]
    ours, reasons = trained(lambda run: 1.0, change, is_compiled=True, is_own=True)
    theirs, _ = trained(lambda run: 1.0, change, is_compiled=False, is_own=True)
    torch.testing.assert_close(ours, theirs)
    assert reasons == [reason]


def test_attributes_that_the_step_does_not_name_are_free() -> None:
    def change(run: Run) -> None:
        run.model.weight.unread = run.optimizer.unread = run.outside.unread = 3.0

    _, reasons = trained(lambda run: run.outside, change, is_compiled=True)
    assert not any("unread" in one for one in reasons)


def test_a_step_that_sums_over_all_of_the_state_counts_it_once() -> None:
    results = []
    for is_compiled in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.Adam(model.parameters(), 0.1)

        def step(
            x: torch.Tensor, model: nn.Module = model, optimizer: torch.optim.Adam = optimizer
        ) -> tuple[torch.Tensor, int, int]:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            total = sum(one["exp_avg"].abs().sum() for one in optimizer.state.values())
            return total, len(optimizer.state), len(optimizer.state.keys())

        train = amp_ir.jit(step, model=model, optimizer=optimizer) if is_compiled else step
        results.append([train(X) for _ in range(3)])
    torch.testing.assert_close(*results)


def test_an_attribute_of_a_tensor_of_the_batch_is_refused() -> None:
    model = nn.Linear(4, 3)

    def step(x: torch.Tensor) -> None:
        (model(x).mean() * x.weighted).backward()

    batch = X.clone()
    batch.weighted = 2.0
    message = (
        "the step reads the attribute 'weighted' of a tensor of the batch. Pass its value to the "
        "step as an argument"
    )
    with pytest.raises(errors.CaptureError, match=message):
        amp_ir.jit(step, model=model)(batch)
    batch.unread = batch.weighted
    del batch.weighted
    amp_ir.jit(lambda x: model(x).mean().backward(), model=model)(batch)


def counts(parameter: nn.Parameter) -> None:
    parameter.calls += 1


def averages(parameter: nn.Parameter) -> None:
    if not hasattr(parameter, "calls") or isinstance(parameter.calls, int):
        parameter.calls = parameter.grad.clone()
    parameter.grad.add_(parameter.calls)


def forgets(parameter: nn.Parameter) -> None:
    if hasattr(parameter, "calls"):
        del parameter.calls


@pytest.mark.parametrize("sets", [counts, averages, forgets])
def test_an_attribute_of_a_parameter_that_the_step_changes_is_refused(
    sets: Callable[[nn.Parameter], None],
) -> None:
    model = nn.Linear(4, 3)
    model.weight.calls = 0

    def step(x: torch.Tensor) -> None:
        model(x).mean().backward()
        sets(model.weight)
        model.zero_grad()

    message = "the step sets the attribute 'calls' of weight. Register a tensor as a buffer of the"
    with pytest.raises(errors.CaptureError, match=message):
        amp_ir.jit(step, model=model)(X)
    assert model.weight.calls == 0


def test_an_attribute_that_the_step_deletes_again_is_free() -> None:
    model = nn.Linear(4, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        model(x).mean().backward()
        model.weight.kept = model.weight.grad * 2
        total = model.weight.kept.sum()
        del model.weight.kept
        model.zero_grad()
        return total

    torch.testing.assert_close(amp_ir.jit(step, model=model)(X), step(X))
