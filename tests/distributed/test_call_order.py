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
from rank_errors import AT_STEPS, DIFFERENT, NOT_AGAIN, ORDER, SAME, TOGETHER, plain
from rank_processes import ranks

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
]


FIRST, SECOND = (f"Two.__init__.{name}_step (LINE)" for name in ("first", "second"))


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
        assert [plain(seen.error) for seen in one[:2]] == [
            f"{DIFFERENT}: on rank 1, the step is {of_1}, and on rank 0 {of_0}. Nothing has "
            f"changed. {SAME}"
            for of_0, of_1 in ((FIRST, SECOND), (SECOND, FIRST))
        ]
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
        assert [plain(seen.error) for seen in one[2:4]] == [
            f"RanksDifferError: {AT_STEPS} {call}: rank 0 at {of_0}, rank 1 at {of_1}. Nothing has "
            f"changed. {ORDER}"
            for call, of_0, of_1 in ((3, FIRST, SECOND), (4, SECOND, FIRST))
        ]
        assert all(seen.is_unchanged and seen.seconds < 5 for seen in one[2:4])


AT_NEW = (
    f"{AT_STEPS} 3: rank 0 at {FIRST}, another rank at {SECOND}, which it calls for the first "
    f"time. {ORDER}"
)
IN_WAIT = "call N of N of the step, all_reduce_wait (all_reduce_wait) in step (backward), LINE"


def test_a_new_step_of_one_rank_and_an_old_one_of_the_other(tmp_path: Path) -> None:
    def program(rank: int) -> list[Seen]:
        two = Two(rank)
        second = two.second if rank else two.first
        return two.call(two.first, two.first, second, two.first)

    old, new = ranks(program, tmp_path)
    for one in (old, new):
        assert [seen.error for seen in one[:2]] == ["", ""]
        assert one[2].is_unchanged and one[3].is_unchanged
        # The exchange that the old step began cannot be taken back: all steps of the group end.
        assert plain(one[3].error) == f"RankFailedError: {AT_NEW}{NOT_AGAIN}"
    assert plain(new[2].error) == f"RankFailedError: {AT_NEW}"
    assert plain(old[2].error) == f"StepFailedError: {IN_WAIT}, failed: {AT_NEW}{TOGETHER}"
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
        assert plain(one[3].error) == (
            f"RankFailedError: rank 1 of 2 failed at call 3: ValueError: a cosmic ray{NOT_AGAIN}"
        )
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
        name = f"{program.__qualname__.replace('<locals>.', '')}.step_of.step (LINE)"
        assert plain(one.error) == (
            f"{DIFFERENT}: on rank 1, the step is {name}, number 2 of this name, and on rank 0 "
            f"{name}. Nothing has changed. {SAME}"
        )
        assert one.is_unchanged
