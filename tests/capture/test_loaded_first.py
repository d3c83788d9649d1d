# SPDX-License-Identifier: Apache-2.0
"""What code may read before it writes it: by the ways through it, not by the order of its lines."""

# ruff: noqa: B018 (an attribute that is read alone)
from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.capture.guards.code_reads import reads_of
from amp_ir.capture.guards.loaded_first import loaded_first


def in_one_branch(a: Any, b: Any) -> None:
    if b:
        a.size = 1
    a.size


def in_both_branches(a: Any, b: Any) -> None:
    if b:
        a.size = 1
    else:
        a.size = 2
    a.size


def in_another_object(a: Any, b: Any) -> None:
    b.size = 1
    a.size


def behind_a_return(a: Any, b: Any) -> Any:
    if b:
        return a.size
    a.size = 1
    return a.size


def in_a_loop(a: Any, b: Any) -> None:
    for one in b:
        if one:
            a.size = 1
        a.size


def for_each_item(a: Any, b: Any) -> None:
    for one in b:
        one.size = 1
        one.size


def of_an_item_before(a: Any, b: Any) -> None:
    for one in b:
        a.size
        a = one
        a.size = 1


def through_a_part_that_is_replaced(a: Any, b: Any) -> None:
    a.part.size = 1
    a.part = b
    a.part.size


def through_a_part(a: Any, b: Any) -> None:
    a.part.size = 1
    a.part.size


def added_to(a: Any, b: Any) -> None:
    a.size = 0
    a.size += 1
    a.size += 1


def added_to_first(a: Any, b: Any) -> None:
    a.size += 1


def within_with(a: Any, b: Any) -> None:
    with contextlib.nullcontext():
        a.size = 1
    a.size


def where_an_exception_ends(a: Any, b: Any) -> None:
    try:
        a.size = b()
    except ValueError:
        a.size = 1
    a.size


def where_an_exception_passes(a: Any, b: Any) -> None:
    try:
        a.size = b()
    except ValueError:
        pass
    a.size


def where_an_exception_is_handled(a: Any, b: Any) -> None:
    try:
        a.size = b()
    except ValueError:
        a.size


def where_none_was_raised(a: Any, b: Any) -> None:
    try:
        b()
    except ValueError:
        a.size = 2
    else:
        a.size = 1
    a.size


def where_with_may_catch(a: Any, b: Any) -> None:
    with torch.no_grad(), contextlib.suppress(ValueError):
        a.size = b()
    a.size


def where_with_lets_pass(a: Any, b: Any) -> None:
    with torch.no_grad(), torch.autocast("cpu", dtype=b.dtype) as b.mode:
        a.size = b()
    a.size


def in_one_case(a: Any, b: Any) -> None:
    match b:
        case 1:
            a.size = 1
        case [_, _]:
            a.size = 2
    a.size


def deleted(a: Any, b: Any) -> None:
    a.size = a.other = 1
    del a.other
    a.size


def in_a_choice(a: Any, b: Any) -> None:
    a.size = 1
    (a if b else b).size


FIRST: dict[Any, bool] = {
    in_one_branch: True,
    in_both_branches: False,
    in_another_object: True,
    behind_a_return: True,
    in_a_loop: True,
    for_each_item: False,
    of_an_item_before: True,
    through_a_part_that_is_replaced: True,
    through_a_part: False,
    added_to: False,
    added_to_first: True,
    within_with: False,
    where_an_exception_ends: False,
    where_an_exception_passes: True,
    where_an_exception_is_handled: True,
    where_none_was_raised: False,
    where_with_may_catch: True,
    where_with_lets_pass: False,
    in_one_case: True,
    deleted: False,
    in_a_choice: True,
}
"""Functions, and whether `size` may be read before it is written."""


@pytest.mark.parametrize("function", FIRST, ids=lambda one: one.__name__)
def test_a_name_is_loaded_first(function: Callable[..., Any]) -> None:
    assert (("attribute", "size") in loaded_first(function.__code__)) == FIRST[function]


def test_globals_and_closure_variables_are_told_apart() -> None:
    size = 1

    def function(a: Any) -> Any:
        nonlocal size
        global LIMIT
        a.size = a.LIMIT = a
        if a:
            LIMIT = size
        size = LIMIT

    assert loaded_first(function.__code__) >= {("cell", "size"), ("global", "LIMIT")}
    assert not {("attribute", "size"), ("attribute", "LIMIT")} & loaded_first(function.__code__)


def test_a_jump_leads_to_an_instruction_with_a_prefix() -> None:
    names = "; ".join(f"b.n{k} = 1" for k in range(300))
    lines = ["def function(a, b):", f"    {names}", "    a.size = 1", "    (b if b else a).size"]
    made: dict[str, Any] = {}
    exec("\n".join(lines), made)  # noqa: S102 (its names are too many to write)
    assert ("attribute", "size") in loaded_first(made["function"].__code__)


def test_a_closure_variable_is_loaded_where_a_function_that_loads_it_is_made() -> None:
    size = ready = 1

    def function() -> Any:
        nonlocal size, ready
        ready = 2
        before = lambda: (size, ready)  # noqa: E731
        found = before()
        size = 3
        return found

    assert loaded_first(function.__code__) == {("cell", "size")}
    assert not {"size"} & reads_of(function.__code__).stored_first


class Net(nn.Module):
    """A layer with a number that one of its ways sets before it is read, and another one after."""

    def __init__(self, *, resets: bool) -> None:
        super().__init__()
        self.layer, self.resets, self.factor = nn.Linear(4, 4), resets, 1.0

    def forward(self, x: torch.Tensor) -> Any:
        if self.resets:
            self.factor = 1.0
        h = self.layer(x) * self.factor
        self.factor = 2.0
        return h


@pytest.mark.parametrize("resets", [False, True])
def test_a_number_of_another_way_is_that_of_the_call_before(*, resets: bool) -> None:
    """The number is 2 from the second call on; a compiled step had that of the first."""
    losses = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = Net(resets=resets)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        train = amp_ir.jit(step, model=model, optimizer=optimizer, amp_dtype=None)
        call: Any = train if is_compiled else step
        try:
            losses.append([float(call(torch.ones(2, 4)).detach()) for _ in range(3)])
        except amp_ir.errors.CaptureError as refused:
            assert "changes attribute 'factor'" in str(refused) and not resets
            return
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


TABLE: dict[str, float] = {}


def without_an_entry(net: Any, h: Any) -> Any:
    with contextlib.suppress(KeyError):
        net.factor = TABLE["none"]
    h = h * net.factor
    net.factor = 2.0
    return h


def in_a_handler(net: Any, h: Any) -> Any:
    try:
        net.factor = TABLE["none"]
    except KeyError:
        h = h * net.factor
        net.factor = 2.0
    return h


def closure() -> Any:
    factor = 1.0

    def in_a_function_of_the_step(net: Any, h: Any) -> Any:
        nonlocal factor

        def times() -> Any:
            return h * factor

        found = times()
        factor = 2.0
        return found

    return in_a_function_of_the_step


READS = [without_an_entry, in_a_handler, closure()]


@pytest.mark.parametrize("read", READS, ids=lambda one: one.__name__)
def test_what_is_read_after_an_exception_is_not_that_of_the_first_call(read: Any) -> None:
    """The number is 2 from the second call on; each was silently 1."""
    model = nn.Linear(4, 4)
    model.factor = 1.0  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = read(model, model(x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    train = amp_ir.jit(step, model=model, optimizer=optimizer, amp_dtype=None)
    with pytest.raises(amp_ir.errors.CaptureError, match="which was 1.0 and becomes 2.0"):
        train(torch.ones(2, 4))


class Sized(nn.Module):
    """Keeps the size of its batch, which another of its functions reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.size = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.size = len(x)
        return self.scaled(self.layer(x))

    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        return h / self.size


def test_a_number_that_is_written_before_another_function_reads_it_is_no_guard() -> None:
    model = Sized()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    train = amp_ir.jit(step, model=model, optimizer=optimizer, amp_dtype=None)
    for size in (4, 3, 5, 3, 4, 5, 4, 3):
        x = torch.ones(size, 4)
        expected = (model.layer(x) / size).square().mean().detach()
        torch.testing.assert_close(train(x), expected, rtol=1e-5, atol=1e-7)
    assert len(train.recompiles) == 2
