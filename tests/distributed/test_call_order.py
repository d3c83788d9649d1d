# SPDX-License-Identifier: Apache-2.0
"""Several steps of one process group: called in one order they train, in another one they raise.

A rank that hangs fails its test by the limit of `rank_processes.ranks`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn

import amp_ir
from amp_ir import errors
from amp_ir.distributed.exchange import Exchange
from data_parallel import Training
from rank_processes import ranks

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
]


@attrs.frozen
class Seen:
    """What one call came to on one rank."""

    error: str
    seconds: float
    is_unchanged: bool


def seen(one: Training, act: Callable[[], Any]) -> Seen:
    before, since = one.digest(), time.monotonic()
    try:
        act()
        error = ""
    except errors.AmpIrError as found:
        error = f"{type(found).__name__}: {found}"
    return Seen(error, time.monotonic() - since, one.digest() == before)


class Two:
    """Two models of one structure, each with its optimizer, its step and its compiled step."""

    def __init__(self, rank: int, **options: Any) -> None:
        torch.manual_seed(0)
        self.models = [nn.Linear(6, 6, bias=False) for _ in range(2)]
        self.optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in self.models]
        torch.manual_seed(1 + rank)
        self.batch = torch.randn(4, 6)

        def first_step(x: torch.Tensor) -> None:
            self.learn(0, x)

        def second_step(x: torch.Tensor) -> None:
            self.learn(1, x)

        self.steps = [first_step, second_step]
        self.training = Training(self.models, self.optimizers, first_step)
        self.first, self.second = (
            amp_ir.jit(step, model=model, optimizer=optimizer, data_parallel=True, **options)
            for step, model, optimizer in zip(self.steps, self.models, self.optimizers, strict=True)
        )

    def learn(self, which: int, x: torch.Tensor) -> None:
        self.models[which](x).square().mean().backward()
        self.optimizers[which].step()
        self.optimizers[which].zero_grad()

    def call(self, *which: Any) -> list[Seen]:
        return [seen(self.training, lambda one=one: one(self.batch)) for one in which]


def test_steps_in_one_order_train_and_compile_at_any_call(tmp_path: Path) -> None:
    def program(rank: int) -> tuple[list[Seen], str]:
        two = Two(rank)
        a, b = two.first, two.second
        return two.call(a, a, b, a, b, b, a), two.training.digest()

    (one, digest), (other, same) = ranks(program, tmp_path)
    assert [seen.error for seen in (*one, *other)] == [""] * 14
    assert digest == same


def test_first_calls_in_another_order_name_both_steps(tmp_path: Path) -> None:
    def program(rank: int) -> list[Seen]:
        two = Two(rank)
        order = (two.second, two.first) if rank else (two.first, two.second)
        # In one order they train after all.
        return two.call(*order, two.first, two.second)

    found = ranks(program, tmp_path)
    for one in found:
        assert all(seen.is_unchanged for seen in one[:2])
        for seen_ in one[:2]:
            assert "RanksDifferError: the ranks of the process group have different" in seen_.error
            assert "first_step (test_call_order.py:" in seen_.error
            assert "second_step (test_call_order.py:" in seen_.error
        assert [seen.error for seen in one[2:]] == ["", ""]


@pytest.mark.parametrize("shard", [None, "optimizer"])
def test_later_calls_in_another_order_are_not_added_up(tmp_path: Path, shard: str | None) -> None:
    """The two steps exchange as many bytes: gloo alone would add gradients of two models."""

    def program(rank: int) -> list[Seen]:
        two = Two(rank, shard=shard)
        begun = two.call(two.first, two.second)
        order = (two.second, two.first) if rank else (two.first, two.second)
        return [*begun, *two.call(*order, two.first, two.second)]

    for one in ranks(program, tmp_path):
        assert [seen.error for seen in (*one[:2], *one[4:])] == [""] * 4
        for k, seen_ in enumerate(one[2:4]):
            assert seen_.error.startswith(
                "RanksDifferError: the ranks of the process group are at different steps in its "
                f"call {k + 3}: rank 0 at "
            ), seen_.error
            assert "first_step (" in seen_.error and "second_step (" in seen_.error
            assert seen_.is_unchanged and seen_.seconds < 5


def test_a_new_step_of_one_rank_and_an_old_one_of_the_other(tmp_path: Path) -> None:
    def program(rank: int) -> list[Seen]:
        two = Two(rank)
        second = two.second if rank else two.first
        return two.call(two.first, two.first, second, two.first)

    old, new = ranks(program, tmp_path)
    for one in (old, new):
        assert [seen.error for seen in one[:2]] == ["", ""]
        assert "different steps in its call 3: rank 0 at " in one[2].error
        assert "first_step (" in one[2].error and "second_step (" in one[2].error
        assert one[2].is_unchanged and one[3].is_unchanged
        # The exchange that the old step began cannot be taken back: all steps of the group end.
        assert "it is not used again" in one[3].error
    assert old[2].seconds < 5


def test_a_failure_in_one_step_ends_the_others_of_its_group(tmp_path: Path) -> None:
    def program(rank: int) -> list[Seen]:
        two = Two(rank)
        begun = two.call(two.first, two.second)
        if rank:

            def fail(*_: Any) -> None:
                raise ValueError("a cosmic ray")

            Exchange.start = fail  # type: ignore[method-assign]
        return [*begun, *two.call(two.first, two.second)]

    for one in ranks(program, tmp_path, timeout_seconds=10):
        assert [seen.error for seen in one[:2]] == ["", ""]
        assert "a cosmic ray" in one[2].error and "not used again" in one[3].error
        assert one[2].is_unchanged and one[3].is_unchanged


def test_steps_of_one_name_are_told_apart_by_their_order(tmp_path: Path) -> None:
    def program(rank: int) -> list[Seen]:
        torch.manual_seed(0)
        models = [nn.Linear(6, 6) for _ in range(2)]
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in models]

        def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
            def step(x: torch.Tensor) -> None:
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

            return amp_ir.jit(step, model=model, optimizer=optimizer, data_parallel=True)

        steps = [step_of(*one) for one in zip(models, optimizers, strict=True)]
        training = Training(models, optimizers, lambda: None)
        return [seen(training, lambda: steps[rank](torch.ones(2, 6)))]

    for (one,) in ranks(program, tmp_path):
        assert "number 2 of this name" in one.error and one.is_unchanged
