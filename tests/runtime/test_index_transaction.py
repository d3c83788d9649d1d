# SPDX-License-Identifier: Apache-2.0
"""A step with an index out of range leaves no trace: it is as if it had not been called."""

from __future__ import annotations

import re
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir
from amp_ir.errors import IndexOutOfRangeError
from cuda_emulator import in_emulator

X = torch.linspace(-1, 1, 12).reshape(4, 3)
GOOD, BAD = torch.tensor([0.0, 3.0]), torch.tensor([0.0, 4.0])


@attrs.define
class Run:
    """One training with all kinds of state, compiled."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Any
    train: Any

    def state(self) -> dict[str, Any]:
        """Everything that a step may change."""
        held: dict[str, Any] = {**self.model.state_dict(), **self.train.state_dict()}
        for name, parameter in self.model.named_parameters():
            held[f"{name}.grad"] = parameter.grad
            for key, value in self.optimizer.state[parameter].items():
                held[f"{name}.{key}"] = value
        for name, value in (self.scaler.state_dict() if self.scaler else {}).items():
            held[f"scaler.{name}"] = torch.tensor(float(value or 0))
        return {key: value.clone() for key, value in held.items() if value is not None}


def run(kind: str) -> Run:
    """`kind`: "scaled" under a loss scale, "accumulating" in gradients that stay, or "plain"."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"head": nn.Linear(3, 4), "norm": nn.BatchNorm1d(4)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = amp_ir.GradScaler(init_scale=2.0**10, growth_interval=3) if kind == "scaled" else None

    def step(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        h = F.dropout(model["norm"](model["head"](x)), 0.5)
        loss = h[places.long()].square().mean()
        if scaler is None:
            loss.backward()
            if kind == "plain":
                optimizer.step()
                optimizer.zero_grad()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return loss.detach()

    if kind == "accumulating":
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    options = {} if scaler is None else {"scaler": scaler}
    mod, _ = amp_ir.trace_step(step, (X, GOOD), model=model, optimizer=optimizer, **options)
    return Run(model, optimizer, scaler, amp_ir.compile(mod))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("kind", ["plain", "accumulating", "scaled"])
def test_a_training_goes_on_to_the_bit_as_if_bad_steps_had_not_been_called(kind: str) -> None:
    disturbed, quiet = run(kind), run(kind)
    overflow = torch.full_like(X, torch.inf)
    before = disturbed.state()
    # Also at the first step, before which an optimizer has no state.
    for index in range(6):
        x = overflow if kind == "scaled" and index == 2 else X
        for bad in (BAD, -BAD - 1, torch.tensor([torch.nan, 0.0])):
            with pytest.raises(IndexOutOfRangeError):
                disturbed.train(x, bad)
            assert same(disturbed.state(), before)
        torch.testing.assert_close(disturbed.train(x, GOOD), quiet.train(x, GOOD), equal_nan=True)
        before = disturbed.state()
        assert same(before, quiet.state())
        if kind == "scaled":
            # An index is not an overflow: what is told of skipped steps stays true.
            assert repr(disturbed.train.last) == repr(quiet.train.last)
            assert disturbed.train.skipped == (index == 2)
            with pytest.raises(IndexOutOfRangeError):
                disturbed.train(overflow, BAD)
            assert repr(disturbed.train.last) == repr(quiet.train.last)
            assert same(disturbed.state(), before)


def table_and_places() -> tuple[nn.Module, torch.optim.Optimizer, amp_ir.StepModule]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"table": nn.Embedding(6, 3), "head": nn.Linear(3, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        loss = model["head"](model["table"](ids))[x.long()].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    batch = torch.tensor([0, 5, 1]), torch.tensor([0.0, 2.0])
    return model, optimizer, amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)[0]


LINE = r", \S+\.py:\d+\."


@in_emulator
def test_on_a_gpu_the_step_checks_what_the_batch_holds_too() -> None:
    from cuda_emulator import steps

    steps.register_libraries()
    model, _, mod = table_and_places()
    train = steps.compile_step(mod)
    peer, _, peer_mod = table_and_places()
    peer_train = amp_ir.compile(peer_mod)
    good = torch.tensor([0, 5, 1]), torch.tensor([0.0, -3.0])
    of_ids = r"the step computed the index 6, expected 0 to 5, for amp_ir\.embedding in table "
    of_places = r"the step computed the index 3, expected -3 to 2, for amp_ir\.index in step "
    rest = r"\(forward\)" + LINE + " The step was rolled back: nothing has changed"
    for ids, places, message in (
        (torch.tensor([6, 0, 0]), good[1], of_ids + rest),
        (good[0], torch.tensor([3.0, 0.0]), of_places + rest),
    ):
        torch.testing.assert_close(train(*good), peer_train(*good), rtol=1e-5, atol=1e-6)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with pytest.raises(IndexOutOfRangeError) as caught:
            train(ids, places)
        assert re.fullmatch(message, str(caught.value))
        assert same(before, model.state_dict())
    for key, value in peer.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-5, atol=1e-6)


@in_emulator
def test_on_a_gpu_a_later_call_raises_what_a_step_found() -> None:
    from cuda_emulator import as_cuda

    with as_cuda.as_cuda():
        model, _, mod = table_and_places()
        train = amp_ir.compile(mod, device="cuda")
        good = torch.tensor([0, 5, 1]), torch.tensor([0.0, -3.0])
        before = {key: value.clone() for key, value in model.state_dict().items()}
        train(good[0] + 1, good[1])
        assert same(before, model.state_dict())
        with pytest.raises(IndexOutOfRangeError, match="the index 6, expected 0 to 5"):
            train(*good)
        # That call was not run; the one after it is.
        assert same(before, model.state_dict())
        train(*good)
        assert not same(before, model.state_dict())
        before = {key: value.clone() for key, value in model.state_dict().items()}
        train(good[0], good[1] + 6)
        with pytest.raises(IndexOutOfRangeError, match="the index 6, expected -3 to 2"):
            train.synchronise()
        train.synchronise()
        assert same(before, model.state_dict())
