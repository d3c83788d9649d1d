# SPDX-License-Identifier: Apache-2.0
"""What changes in param groups between two steps, of PyTorch's options and of the user's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir

Group = dict[str, Any]
Change = Callable[[torch.optim.Optimizer], object]
Read = Callable[[Group], Any]


class Scaled(torch.optim.Optimizer):
    """An optimizer of the user's, which reads an entry that has no default."""

    def __init__(self, groups: list[Group], read: Read | None) -> None:
        super().__init__(groups, {"lr": 0.1})
        self.read = read

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                factor = 1.0 if self.read is None else self.read(group)
                parameter.sub_(parameter.grad * group["lr"] * factor)


def scaling_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, read: Read | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        if read is not None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(read(group))
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def trained(
    entries: Group, change: Change, read: Read | None, *, is_own: bool, is_compiled: bool
) -> tuple[list[torch.Tensor], list[str]]:
    """Return the parameters after three steps, with a change after two, and why it recompiled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    groups = [
        {"params": list(layer.parameters()), **copy.deepcopy(entries)}
        for layer in (model[0], model[2])
    ]
    optimizer = Scaled(groups, read) if is_own else torch.optim.SGD(groups, lr=0.1)
    step = scaling_step(model, optimizer, None if is_own else read)
    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    for k in range(3):
        if k == 2:
            change(optimizer)
        (train if is_compiled else step)(torch.linspace(-1, 1, 8).view(2, 4))
    reasons = [one.reason for one in train.recompiles]
    return [parameter.detach() for parameter in model.parameters()], reasons


def stored(value: object) -> Change:
    return lambda optimizer: optimizer.param_groups[0].update(k=value)


OF_USERS: dict[str, tuple[Group, Change, Read, str]] = {
    "int": ({"k": 1}, stored(3), lambda group: group["k"], "k of param group 0 was 1 and is 3"),
    "flag": (
        {"k": True},
        stored(False),
        lambda group: 2.0 if group["k"] else 1.0,
        "k of param group 0 was True and is False",
    ),
    "text": (
        {"k": "head"},
        stored("body"),
        lambda group: 2.0 if group["k"] == "head" else 1.0,
        "k of param group 0 was 'head' and is 'body'",
    ),
    "added": (
        {},
        stored(3.0),
        lambda group: group.get("k", 1.0),
        "k of param group 0 was absent and is 3.0",
    ),
    "none": (
        {"k": None},
        stored(3.0),
        lambda group: group["k"] or 1.0,
        "k of param group 0 was None and is 3.0",
    ),
    "float to text": (
        {"k": 2.0},
        stored("half"),
        lambda group: 0.5 if group["k"] == "half" else group["k"],
        "optimizer0.group0.k was removed",
    ),
    "item of a list": (
        {"k": ["a", 1]},
        lambda optimizer: optimizer.param_groups[0]["k"].__setitem__(1, 3),
        lambda group: group["k"][1],
        "k[1] of param group 0 was 1 and is 3",
    ),
    "entry of a dict": (
        {"k": {"by": 1.0}},
        lambda optimizer: optimizer.param_groups[0]["k"].update(by=3.0),
        lambda group: group["k"]["by"],
        "k['by'] of param group 0 was 1.0 and is 3.0",
    ),
    "tensor": (
        {"k": torch.ones(2)},
        stored(torch.full((2,), 3.0)),
        lambda group: group["k"].sum(),
        "k of param group 0 was a tensor of shape (2,) and is another one",
    ),
}


@pytest.mark.parametrize("is_own", [False, True], ids=["step", "optimizer"])
@pytest.mark.parametrize("name", OF_USERS)
def test_a_changed_entry_of_the_users_compiles_again(name: str, is_own: bool) -> None:
    entries, change, read, reason = OF_USERS[name]
    ours, reasons = trained(entries, change, read, is_own=is_own, is_compiled=True)
    theirs, _ = trained(entries, change, read, is_own=is_own, is_compiled=False)
    torch.testing.assert_close(ours, theirs)
    assert reasons == [reason]


def test_an_entry_that_no_code_of_the_users_reads_is_free() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD([{"params": model.parameters(), "k": "head"}], lr=0.1)

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    train(torch.ones(2, 4))
    stored("body")(optimizer)
    train(torch.ones(2, 4))
    assert train.recompiles == []


def pop(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].pop()


def move(optimizer: torch.optim.Optimizer) -> None:
    groups = optimizer.param_groups
    groups[1]["params"].append(groups[0]["params"].pop())


def drop_group(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups.pop()


OF_PARAMETERS: dict[Change, str] = {
    pop: "param group 0 has other parameters",
    move: "param group 0 has other parameters",
    drop_group: "the optimizer had 2 param groups and has 1",
}


@pytest.mark.parametrize("change", OF_PARAMETERS)
def test_a_list_of_parameters_that_is_changed_in_place_compiles_again(change: Change) -> None:
    ours, reasons = trained({}, change, None, is_own=False, is_compiled=True)
    theirs, _ = trained({}, change, None, is_own=False, is_compiled=False)
    torch.testing.assert_close(ours, theirs)
    assert reasons == [OF_PARAMETERS[change]]


@pytest.mark.parametrize("is_dict", [False, True])
def test_the_last_learning_rate_of_a_scheduler_is_an_input(is_dict: bool) -> None:  # noqa: FBT001
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def step(x: torch.Tensor) -> Any:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        rate = scheduler.get_last_lr()[0]
        return {"lr": rate} if is_dict else rate

    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    for k in range(5):
        found = train(torch.ones(3, 4))
        assert (found["lr"] if is_dict else found) == 0.1 * 0.5**k
        scheduler.step()
    assert not train.recompiles
    # Set by someone else: the scheduler's own list stays as it was.
    optimizer.param_groups[0]["lr"] = 0.7
    last = train(torch.ones(3, 4))
    assert (last["lr"] if is_dict else last) == 0.1 * 0.5**5
    scheduler.step()
    last = train(torch.ones(3, 4))
    assert (last["lr"] if is_dict else last) == scheduler.get_last_lr()[0]
    assert "get_last_lr() of a StepLR was True and is False" in train.recompiles[0].reason
