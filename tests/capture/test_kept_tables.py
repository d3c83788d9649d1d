# SPDX-License-Identifier: Apache-2.0
"""Tensors that a step makes in its first call and keeps: read only, or changed in later calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir import errors

X = torch.linspace(-1, 1, 16).view(4, 4)
Keep = Callable[[nn.Module, dict[str, Any]], torch.Tensor]


def trained(keep: Keep, *, is_compiled: bool) -> list[torch.Tensor]:
    """The losses of four calls of a step that adds what it keeps."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    held: dict[str, Any] = {}

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) * keep(model, held)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    train = amp_ir.jit(step, model=model, optimizer=optimizer) if is_compiled else step
    return [train(X * k) for k in range(1, 5)]


def an_attribute(model: Any, _held: dict[str, Any]) -> torch.Tensor:
    if not hasattr(model, "table"):
        model.table = torch.zeros(4)
        model.table[1:] = 1
    return model.table


def a_mask_of_a_loop(model: Any, _held: dict[str, Any]) -> torch.Tensor:
    if not hasattr(model, "table"):
        table = torch.ones(4, 4)
        for k in range(4):
            table[k, :k] = 0.5
        model.table = table
    return model.table


def a_pair(_model: Any, held: dict[str, Any]) -> torch.Tensor:
    if "table" not in held:
        angles = torch.arange(4.0) / 4
        held["table"] = angles.cos(), angles.sin()
    cos, sin = held["table"]
    return cos + sin


def a_cache_by_size(_model: Any, held: dict[Any, Any]) -> torch.Tensor:
    cache = held.setdefault("cache", {})
    if 4 not in cache:
        cache[4] = torch.arange(4.0)
    return cache[4]


def a_buffer(model: Any, _held: dict[str, Any]) -> torch.Tensor:
    if "table" not in model._buffers:
        model.register_buffer("table", torch.arange(4.0))
    return model.table


def one_made_in_each_call(model: Any, _held: dict[str, Any]) -> torch.Tensor:
    model.table = torch.arange(4.0)
    model.table += 1
    return model.table


class Kept:
    """An object of the user's."""

    table: torch.Tensor


def an_object(model: Any, _held: dict[str, Any]) -> torch.Tensor:
    if not hasattr(model, "kept"):
        model.kept = Kept()
        model.kept.table = torch.arange(4.0)
    return model.kept.table


READ = [
    an_attribute, a_mask_of_a_loop, a_pair, a_cache_by_size, a_buffer, one_made_in_each_call,
    an_object,
]  # fmt: skip


@pytest.mark.parametrize("keep", READ, ids=lambda one: one.__name__)
def test_tables_that_are_only_read_are_computed_in_each_call(keep: Keep) -> None:
    """Of constants alone, they are the same at every call."""
    expected, found = trained(keep, is_compiled=False), trained(keep, is_compiled=True)
    # Rounding of float32 sums in another order.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def a_total(_model: Any, held: dict[str, Any]) -> torch.Tensor:
    return held.setdefault("total", torch.zeros(4)).add_(1)


def a_total_in_place_of_itself(model: Any, _held: dict[str, Any]) -> torch.Tensor:
    model.total = getattr(model, "total", torch.zeros(4)) + 1
    return model.total


def a_total_by_a_view(model: Any, _held: dict[str, Any]) -> torch.Tensor:
    if not hasattr(model, "total"):
        model.total = torch.zeros(4)
    model.total[0] += 1
    return model.total


def a_total_in_a_buffer(model: Any, _held: dict[str, Any]) -> torch.Tensor:
    if "total" not in model._buffers:
        model.register_buffer("total", torch.zeros(4))
    model.total += 1
    return model.total


def a_turning_pair(_model: Any, held: dict[str, Any]) -> torch.Tensor:
    first, second = held.get("pair", (torch.zeros(4), torch.ones(4)))
    held["pair"] = second, first
    return first


def a_total_in_an_object(model: Any, _held: dict[str, Any]) -> torch.Tensor:
    if not hasattr(model, "kept"):
        model.kept = Kept()
        model.kept.table = torch.zeros(4)
    model.kept.table += 1
    return model.kept.table


def a_total_of_many_ops(model: Any, _held: dict[str, Any]) -> torch.Tensor:
    if not hasattr(model, "total"):
        model.total = torch.zeros(4)
    for k in range(400):
        model.total[k % 4] += 0.01
    return model.total


CHANGED = {
    a_total: "closure variable 'held' of step (test_kept_tables.py:",
    a_total_in_place_of_itself: "attribute 'total' of module (the model itself)",
    a_total_by_a_view: "attribute 'total' of module (the model itself)",
    a_total_in_a_buffer: "buffer 'total' of Linear",
    a_total_in_an_object: "attribute 'kept' of module (the model itself)",
    a_total_of_many_ops: "attribute 'total' of module (the model itself)",
    a_turning_pair: "closure variable 'held' of step (test_kept_tables.py:",
}


@pytest.mark.parametrize("keep", CHANGED, ids=lambda one: one.__name__)
def test_what_later_calls_change_is_refused(keep: Keep) -> None:
    """Each of these was as in the first call at every call, silently."""
    with pytest.raises(errors.CaptureError) as caught:
        trained(keep, is_compiled=True)
    message = str(caught.value)
    assert f"makes a tensor of shape (4,) for {CHANGED[keep]}" in message
    assert "and changes it once it is there. Make it before the first call, and update" in message


def test_the_message_names_the_line() -> None:
    """As a user reads it."""
    with pytest.raises(errors.CaptureError) as caught:
        trained(a_total_by_a_view, is_compiled=True)
    line = a_total_by_a_view.__code__.co_firstlineno + 2
    assert str(caught.value) == (
        "this step cannot be captured, 1 place:\n"
        f"  1. step (forward), {__file__}:{line}: makes a tensor of shape (4,) for "
        "attribute 'total' of module (the model itself), and changes it once it is there. Make it "
        "before the first call, and update it in place: a tensor that is there is followed"
    )


def a_queue_written_by_views(_model: Any, held: dict[str, Any]) -> torch.Tensor:
    if "queue" not in held:
        held["queue"] = torch.zeros(4, 4)
    queue = held["queue"]
    queue[1:] = queue[:-1].clone()
    queue[0] = _model.weight.detach()[0]
    return queue


def test_a_table_into_whose_views_results_go_is_a_result() -> None:
    """It was a constant to the guards, and forgotten after each call, silently."""
    with pytest.raises(errors.CaptureError, match=r"keeps a tensor of shape \(4, 4\)"):
        trained(a_queue_written_by_views, is_compiled=True)


def test_a_total_that_is_there_is_followed() -> None:
    """What the message advises."""

    def keep(model: Any, held: dict[str, Any]) -> torch.Tensor:
        return held["total"].add_(1)

    def with_total(*, is_compiled: bool) -> list[torch.Tensor]:
        total = {"total": torch.zeros(4)}
        return trained(lambda model, _held: keep(model, total), is_compiled=is_compiled)

    expected, found = with_total(is_compiled=False), with_total(is_compiled=True)
    # Rounding of float32 sums in another order.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


class Growing(nn.Module):
    """Adds positions, of which it keeps a table that grows with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.longest = 0
        self.built = 0
        self.mask: torch.Tensor | None = None

    def grow(self, length: int) -> None:
        """Make the tables anew, as many public rotary and sinusoidal embeddings do."""
        self.longest = length
        self.built += 1
        position = torch.arange(length).float()[:, None]
        table = torch.zeros(length, 4)
        table[:, 0::2] = torch.sin(position * torch.tensor([1.0, 0.5]))
        table[:, 1::2] = torch.cos(position * torch.tensor([1.0, 0.5]))
        self.table = table
        self.mask = torch.ones(length, length).tril()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[0]
        if self.mask is None or length > self.longest:
            self.grow(length)
        assert self.mask is not None
        return self.mask[:length, :length] @ self.layer(x) + self.table[:length]


class Turning(Growing):
    """Keeps its tables in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[0]
        if length > self.longest:
            self.longest = length
            angles = torch.arange(length).float()[:, None] * torch.tensor([1.0, 0.5, 0.2, 0.1])
            self.kept["turns"] = angles.cos(), angles.sin()
        cos, sin = self.kept["turns"]
        y = self.layer(x)
        return y * cos[:length] + y.flip(-1) * sin[:length]


class Whole(Growing):
    """Reads its table whole, in the backward pass too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > self.longest:
            self.longest = x.shape[0]
            self.table = torch.arange(1.0, 5.0)
        return self.layer(x) * self.table + self.table


@pytest.mark.parametrize("kind", [Growing, Turning, Whole])
def test_tables_beside_a_number_are_left_as_the_number_is(kind: type[Growing]) -> None:
    """The second trace of the step had the number and no table: an AttributeError."""
    torch.manual_seed(0)
    models = [kind(), kind()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in models]

    def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    ours, theirs = map(step_of, models, optimizers)
    train = amp_ir.jit(ours, model=models[0], optimizer=optimizers[0])
    for length in (6, 6, 4, 9, 9, 6, 4, 9):
        x = torch.randn(length, 4)
        # Rounding of float32 sums in another order.
        torch.testing.assert_close(train(x), theirs(x), rtol=1e-5, atol=0)
        found, expected = ({**vars(one), **vars(one).get("kept", {})} for one in models)
        for name in ("longest", "built", "table", "mask", "turns"):
            torch.testing.assert_close(found.get(name), expected.get(name), rtol=1e-6, atol=1e-7)
    compiled = len(train.recompiles)
    for length in (9, 4, 6):
        train(torch.randn(length, 4))
    assert len(train.recompiles) == compiled


def beside_a_number(model: Any, change: Callable[[Any], None]) -> torch.Tensor:
    """Make a tensor and a number in the first call, and change the tensor in each."""
    if not hasattr(model, "begun"):
        model.begun = True
        model.total = torch.zeros(4)
    change(model)
    return model.total


def add_in_place(model: Any) -> None:
    model.total += 1


def rebind(model: Any) -> None:
    model.total = model.total + 1


@pytest.mark.parametrize("change", [add_in_place, rebind])
def test_a_total_beside_a_number_is_refused(change: Callable[[Any], None]) -> None:
    with pytest.raises(errors.CaptureError) as caught:
        trained(lambda model, _held: beside_a_number(model, change), is_compiled=True)
    assert "makes a tensor of shape (4,) for attribute 'total' of module" in str(caught.value)


def test_a_first_call_that_differs_by_more_than_its_table_is_refused() -> None:
    def keep(model: Any, _held: dict[str, Any]) -> torch.Tensor:
        factor = 1
        if not hasattr(model, "begun"):
            model.begun, model.table, factor = True, torch.arange(4.0), 2
        return model.table * factor

    with pytest.raises(errors.CaptureError, match="changes attribute 'begun' of module"):
        trained(keep, is_compiled=True)


def test_a_first_call_that_fails_leaves_no_table() -> None:
    """It is as if it had not been made."""
    model = Growing()

    def step(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        loss = model(x)[index].sum()
        loss.backward()
        return loss.detach()

    train = amp_ir.jit(step, model=model)
    with pytest.raises(IndexError):
        train(torch.randn(4, 4), torch.tensor([7]))
    assert (model.longest, model.built, model.mask) == (0, 0, None)
    train(torch.randn(4, 4), torch.tensor([3]))
    assert (model.longest, model.built) == (4, 1)


class Turns(nn.Module):
    """Keeps tables of angles of `frequencies`, a buffer or an attribute, in one of four ways."""

    def __init__(self, how: str, *, is_buffer: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.how = how
        frequencies = torch.tensor([1.0, 0.5, 0.2, 0.1])
        if is_buffer:
            self.register_buffer("frequencies", frequencies)
        else:
            self.frequencies = frequencies
        self.length: int | None = None
        self.table: torch.Tensor | None = None
        self.kept: dict[int, torch.Tensor] = {}

    def make(self, length: int) -> torch.Tensor:
        return torch.outer(torch.arange(length).type_as(self.frequencies), self.frequencies).cos()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = len(x)
        if self.how == "dict":
            if length not in self.kept:
                self.kept[length] = self.make(length)
            return self.layer(x) * self.kept[length]
        is_short = self.table is None or len(self.table) < length
        if {"same": length != self.length, "grows": is_short, "once": self.table is None}[self.how]:
            self.length = length if self.how == "same" else None
            self.table = self.make(9 if self.how == "once" else length)
        assert self.table is not None
        return self.layer(x) * self.table[:length]


def turns_in_place(model: Any) -> None:
    model.frequencies.mul_(3)


def turns_anew(model: Any) -> None:
    model.frequencies = model.frequencies * 3


@pytest.mark.parametrize("change", [None, turns_in_place, turns_anew])
@pytest.mark.parametrize("is_buffer", [False, True])
@pytest.mark.parametrize("how", ["same", "grows", "once", "dict"])
def test_tables_of_what_may_change_are_kept_as_they_were(
    how: str, is_buffer: bool, change: Callable[[Any], None] | None
) -> None:
    """Those of buffers were refused; those of other tensors were as at the capture, or as now.

    So `frequencies` changed after three calls gave other numbers than PyTorch, silently.
    """
    losses, tables = [], []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = Turns(how, is_buffer=is_buffer)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(
            x: torch.Tensor, model: nn.Module = model, optimizer: Any = optimizer
        ) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        train = amp_ir.jit(step, model=model, optimizer=optimizer) if is_compiled else step
        found = []
        for count, length in enumerate((3, 3, 5, 3, 5, 6, 6)):
            if count == 3 and change is not None:
                change(model)
            found.append(train(torch.ones(length, 4)))
        losses.append(found)
        tables.append((model.table, model.kept))
    # Rounding of float32 sums in another order.
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(tables[1], tables[0], rtol=1e-6, atol=1e-7)


def of_a_statistic(model: Any, _held: dict[str, Any]) -> torch.Tensor:
    model.norm(X)
    if not hasattr(model, "table"):
        model.table = model.norm.running_mean * 2
    return model.table


def of_a_weight(model: Any, _held: dict[str, Any]) -> torch.Tensor:
    if not hasattr(model, "table"):
        model.table = model.weight.detach()[0] * 2
    return model.table


def of_a_buffer_in_each_call(model: Any, _held: dict[str, Any]) -> torch.Tensor:
    model.table = model.norm.weight.detach() * 2
    return model.table


@pytest.mark.parametrize("keep", [of_a_statistic, of_a_weight, of_a_buffer_in_each_call])
def test_what_is_made_of_what_the_step_writes_is_kept_as_in_pytorch(keep: Keep) -> None:
    losses = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Linear(4, 4)
        model.norm = nn.BatchNorm1d(4)
        model.norm.weight.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            loss = (model(x) * keep(model, {})).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        train = (
            amp_ir.jit(step, model=model, optimizer=optimizer, amp_dtype=None)
            if is_compiled
            else step
        )
        losses.append(torch.stack([train(X * k) for k in (1, 2, 3, 4)]))
    # Rounding of float32 sums in another order.
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-7)
