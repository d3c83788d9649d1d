# SPDX-License-Identifier: Apache-2.0
"""Ranks with split state that would update unlike: nothing is put together of two trainings."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amp_ir
from amp_ir import errors
from amp_ir.dialect.collectives import START_SYMBOL
from amp_ir.distributed.compared_calls import difference_of_calls
from amp_ir.distributed.meeting import Meeting
from amp_ir.pipeline import lower
from amp_ir.rewrites.exchange_gradients import exchange_gradients
from captured_ranks import captured
from data_parallel import Training, batches, gan
from rank_processes import ranks

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
]
Change = Callable[[nn.Module, torch.Tensor], None]


def leave(_model: nn.Module, _loss: torch.Tensor) -> None:
    """Change no gradient."""


def with_noise(model: nn.Module, _loss: torch.Tensor) -> None:
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p), alpha=0.1)


def times_loss(model: nn.Module, loss: torch.Tensor) -> None:
    for p in model.parameters():
        p.grad.mul_(loss.detach())


class Case:
    """A training with SGD or AdamW, whose state is split over two ranks."""

    def __init__(
        self,
        rank: int,
        optimizer_of: Any,
        *,
        change: Change = leave,
        scale: float = 0.0,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
        self.optimizer = optimizer = optimizer_of(model.parameters())
        scaler = amp_ir.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale > 0)
        self.rank, self.scaler = rank, scaler

        def step(x: torch.Tensor, y: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            change(model, loss)
            for p in model.parameters():
                p.grad.mul_(factor)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss.detach()

        self.training = Training([model], [optimizer], step)
        options |= {"scaler": scaler} if scaler.is_enabled() else {}
        options |= {"data_parallel": True, "shard": "optimizer"}
        self.train = amp_ir.jit(step, model=model, optimizer=optimizer, **options)

    def call(self, *, rows: int = 8, factor: float = 1.0) -> str:
        """Run a step on a batch of this rank's own; return the error."""
        x = torch.linspace(-1, 1 + self.rank, rows * 6).view(rows, 6)
        before = self.training.digest()
        try:
            self.train(x, torch.arange(rows) % 4, torch.tensor(factor))
        except errors.AmpIrError as error:
            assert self.training.digest() == before
            return f"{type(error).__name__}: {error}"
        assert self.training.digest() != before
        return ""

    def set(self, **values: Any) -> None:
        self.optimizer.param_groups[0].update(values)


def sgd(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda p: torch.optim.SGD(p, **{"lr": 0.1, "momentum": 0.9, **options})


def adamw(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda p: torch.optim.AdamW(p, **{"lr": 1e-2, **options})


class OfLeftGradients(Case):
    """A training whose step only updates, from what is in `p.grad`; `call` is given a number."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
        self.model, self.optimizer = model, torch.optim.SGD(model.parameters(), 0.1, 0.9)
        self.training = Training([model], [self.optimizer], self.optimizer.step)

        def step(x: torch.Tensor) -> torch.Tensor:
            self.optimizer.step()
            return x

        options: dict[str, Any] = {"data_parallel": True, "shard": "optimizer"}
        self.train = amp_ir.jit(step, model=model, optimizer=self.optimizer, **options)
        self.rank = rank

    def call(self, *, rows: int = 8, factor: float = 1.0) -> str:
        for p in self.model.parameters():
            p.grad = torch.linspace(0, factor, p.numel()).view_as(p)
        before = self.training.digest()
        try:
            self.train(torch.ones(rows))
        except errors.RanksDifferError as error:
            assert self.training.digest() == before
            return str(error)
        assert self.training.digest() != before
        return ""


def unlike(rank: int) -> dict[str, list[str]]:
    """What each call said, of ranks that differ in one thing."""
    torch.set_num_threads(1)
    found = {}
    one = Case(rank, sgd(lr=0.1 + 0.1 * rank))
    found["lr"] = [one.call()]
    one.set(lr=0.1)
    found["lr"] += [one.call(), one.call()]
    one.set(lr=0.5 if rank else 0.1)
    found["lr"].append(one.call())
    one.set(lr=0.05)
    found["lr"].append(one.call())
    # Batches of other shapes are other programs, whose ops are not compared as a whole.
    one = Case(rank, adamw(betas=(0.9 - 0.1 * rank, 0.999)))
    found["betas"] = [one.call(rows=8 + rank)]
    found["nesterov"] = [Case(rank, sgd(nesterov=bool(rank))).call(rows=8 + rank)]
    one = Case(rank, adamw(), scale=16.0)
    found["scale"] = [one.call()]
    if rank:
        one.scaler.update(4.0)
    found["scale"].append(one.call())
    one = Case(rank, sgd())
    found["argument"] = [one.call(factor=0.5), one.call(factor=0.5 + rank), one.call(factor=0.5)]
    torch.manual_seed(7)
    found["noise"] = [Case(rank, sgd(), change=with_noise).call()]
    one = Case(rank, sgd(), change=with_noise)
    torch.manual_seed(rank)
    found["noise"].append(one.call())
    one = Case(rank, adamw())
    found["loaded"] = [one.call()]
    whole = amp_ir.gather_state_dict(one.optimizer)
    if rank:
        one.optimizer.load_state_dict(whole)
    found["loaded"].append(one.call())
    if not rank:
        one.optimizer.load_state_dict(whole)
    found["loaded"].append(one.call())
    left = OfLeftGradients(rank)
    found["left"] = [left.call(), left.call(factor=2.0 + rank), left.call(factor=3.0)]
    found["loss"] = [Case(rank, sgd(), change=times_loss).call()]
    return found


def test_what_differs_between_ranks_is_never_put_together(tmp_path: Path) -> None:
    found, second = ranks(unlike, tmp_path)
    assert found == second
    assert [bool(one) for one in found["lr"]] == [True, False, False, True, False]
    assert found["lr"][3].startswith("RanksDifferError: ")
    said = found["lr"][3].removeprefix("RanksDifferError: ")
    lr, step = "optimizer0.group0.lr", said.partition(" call 4 of ")[2].partition(": ")[0]
    assert said == difference_of_calls(4, {0: (step, {lr: "0.1"}), 1: (step, {lr: "0.5"})})
    assert ": optimizer0.group0.betas.0 is 0.9 on rank 0, 0.8 on rank 1. " in found["betas"][0]
    assert "on rank 1, op of the updates " in found["nesterov"][0]
    assert found["scale"][0] == found["argument"][0] == found["argument"][2] == ""
    assert ": scaler0.scale is 16.0 on rank 0, 4.0 on rank 1. " in found["scale"][1]
    assert ": batch2 is 0.5 on rank 0, 1.5 on rank 1. " in found["argument"][1]
    assert found["noise"][0] == found["loaded"][0] == found["loaded"][2] == ""
    assert ": load_state_dict() calls is 0 on rank 0, 1 on rank 1. " in found["loaded"][1]
    assert ": random_state is [0, 0] on rank 0, [1, 0] on rank 1. " in found["noise"][1]
    assert found["left"][0] == found["left"][2] == ""
    assert ": 0.weight.grad is a tensor [" in found["left"][1]
    assert found["left"][1].endswith(
        "; and 1 more. Nothing has changed. With shard= each rank updates a part of the model, so "
        "all need the same: set them alike on all ranks, and call the step again. What was in "
        "p.grad before the step is exchanged by nothing in it: let the step call backward(), or "
        "average p.grad over the ranks before"
    )
    assert found["loss"][0].startswith("ShardingError: shard= leaves each rank a part of every up")


def carried(rank: int) -> dict[str, list[Any]]:
    """What each call said, and by how many all-reduces of their own ranks compared numbers."""
    torch.set_num_threads(1)
    begun: list[int] = []
    roll_call = Meeting._begin_roll_call

    def counted(self: Meeting, contract: Any) -> Any:
        begun.append(self.calls)
        return roll_call(self, contract)

    Meeting._begin_roll_call = counted  # type: ignore[method-assign]
    found: dict[str, list[Any]] = {}
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "bfloat16": {"comm_dtype": "bfloat16"},
        "float16": {"comm_dtype": "float16"},
        "scaled": {"scale": 16.0},
    }
    everyone = list(range(torch.distributed.get_world_size()))
    for name, options in cases.items():
        begun.clear()
        # In a group of its own: where a group has several programs, ranks meet at each call.
        group = torch.distributed.new_group(everyone)
        one = Case(rank, adamw(), process_group=group, **options)
        said = []
        for k, lr in enumerate((0.1, 0.1, 0.2, 0.1, 0.3, 0.3)):
            # One rank alone, and a value that another one had before.
            one.set(lr=lr if rank == everyone[-1] or k in (0, 5) else 0.1)
            said.append(one.call())
        found[name] = [*said, *begun]
    return found


@pytest.mark.parametrize("count", [2, 4])
def test_numbers_travel_with_gradients(tmp_path: Path, count: int) -> None:
    found, *others = ranks(carried, tmp_path, count)
    assert all(one == found for one in others)
    at = f"0.1 on {'rank 0' if count == 2 else 'ranks 0, 1, 2'}, %s on rank {count - 1}. "
    for said in found.values():
        # The first call meets before anything is sent; no other has a message of its own.
        assert said[6:] == [1]
        assert [bool(one) for one in said[:6]] == [False, False, True, False, True, False]
        assert f": optimizer0.group0.lr is {at % 0.2}" in said[2]
        assert f": optimizer0.group0.lr is {at % 0.3}" in said[4]


def test_nothing_is_written_before_numbers_are_compared() -> None:
    one = gan(lambda model: model)
    mod = captured(one.step, batches("gan", 1, 0)[0], one.models, one.optimizers, shard="optimizer")
    plan = lower(exchange_gradients(mod)).plan
    begun = [(k, call) for k, call in enumerate(plan.calls) if call.symbol == START_SYMBOL]
    gathers = [k for k, call in begun if "all_gather_start" in call.ops]
    assert "reduce_scatter_start" in begun[0][1].ops
    assert len(gathers) == 2 and gathers[0] < plan.writes.first_call


def test_how_numbers_that_differ_are_told() -> None:
    at = {0: ("step", {"lr": "0.1", "a": "1", "b": "1", "c": "1"})}
    at[1] = at[3] = ("step", {"lr": "0.2", "a": "2", "b": "2", "c": "2"})
    at[2] = at[0]
    assert difference_of_calls(7, at) == (
        "the ranks of the process group have different numbers at call 7 of step: lr is 0.1 on "
        "ranks 0, 2, 0.2 on ranks 1, 3; a is 1 on ranks 0, 2, 2 on ranks 1, 3; b is 1 on ranks 0, "
        "2, 2 on ranks 1, 3; and 1 more. Nothing has changed. With shard= each rank updates a part "
        "of the model, so all need the same: set them alike on all ranks, and call the step again"
    )
    at[1] = ("other", {})
    assert difference_of_calls(7, at).startswith(
        "the ranks of the process group are at different steps in its call 7: ranks 0, 2, 3 at "
        "step, rank 1 at other. Nothing has changed. "
    )


def refused(write: Callable[[nn.Module, torch.Tensor], None], *, ignored: bool = False) -> str:
    """What is said of a step whose gradients `write` leaves in `p.grad`."""
    model = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> None:
        write(model, model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    names = frozenset({"1.bias"} if ignored else ())
    options: Any = {"shard": "optimizer", "ignored": names}
    with pytest.raises(errors.ShardingError) as error:
        exchange_gradients(captured(step, (torch.ones(4, 6),), [model], [optimizer], **options))
    return str(error.value)


def test_updates_of_a_ranks_own_numbers_are_refused() -> None:
    def without_exchange(model: nn.Module, loss: torch.Tensor) -> None:
        found = torch.autograd.grad(loss, list(model.parameters()))
        for p, grad in zip(model.parameters(), found, strict=True):
            p.grad = grad

    def of_loss(model: nn.Module, loss: torch.Tensor) -> None:
        loss.backward()
        model[0].weight.grad.mul_(loss.detach())

    def clipped(model: nn.Module, loss: torch.Tensor) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    line = of_loss.__code__.co_firstlineno + 2
    assert refused(of_loss) == (
        "shard= leaves each rank a part of every update, and puts the parts together, so ranks "
        "have to update alike; here they compute with numbers of their own batch, which no "
        f"exchange has made alike: relax.multiply in step (forward), {__file__}:{line}, for "
        "0.weight. Compute updates from what backward() leaves in p.grad outside of no_sync, and "
        "from numbers that all ranks have, or leave shard= out: then each rank trains on its own "
        "numbers, as in PyTorch"
    )
    assert "relax.add in step (optimizer)" in refused(without_exchange)
    # The norm has a gradient in it that is not exchanged.
    assert "1.weight" in refused(clipped, ignored=True)
