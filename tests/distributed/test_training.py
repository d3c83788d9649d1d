# SPDX-License-Identifier: Apache-2.0
"""Ranks that train together: their state stays equal, and equals DistributedDataParallel's.

One group of processes runs all cases of a test: starting it costs more than a case.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F

import amp_ir
from data_parallel import WORKLOADS, Batch, Training, batches, mlp, wrapped
from rank_processes import ranks

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
]
STEPS = 50
# Sums of other orders: float32 rounds each by 2^-24 of it. AdamW divides by the root of a second
# moment, and BatchNorm by that of a variance; measured 5e-7 to 3e-6 of the largest number.
ORDER = 2e-5
SMALL = 1e-3


@attrs.frozen
class Outcome:
    """A rank's state after training, and how far it is from PyTorch's after five steps."""

    digest: str
    difference: float
    recompiles: tuple[str, ...] = ()


def jitted(one: Training, **options: Any) -> Any:
    return amp_ir.jit(one.step, model=one.models, optimizer=one.optimizers, **options)


def difference(one: Training, other: Training) -> float:
    """The largest difference of the states, each beside the largest number of its tensor."""
    theirs = other.state()
    pairs = [(ours.double(), theirs[name].double()) for name, ours in one.state().items()]
    return max(float((a - b).abs().max() / (SMALL + b.abs().max())) for a, b in pairs)


def shared_digest(one: Training) -> str:
    """Of the state without BatchNorm's statistics, which are rank 0's at the next forward pass."""
    for model in one.models:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
    return one.digest()


def not_wrapped(model: nn.Module) -> nn.Module:
    return model


def outcome(name: str, rank: int, *, is_plain: bool) -> Outcome:
    """Train a workload for STEPS, and its first five steps in PyTorch too."""
    make, _ = WORKLOADS[name]
    ours, theirs = make(not_wrapped if is_plain else wrapped), make(wrapped)
    train = jitted(ours, data_parallel=True) if is_plain else jitted(ours)
    found = 0.0
    for k, batch in enumerate(batches(name, STEPS, rank)):
        train(*batch)
        if k < 5:
            theirs.step(*batch)
            found = difference(ours, theirs)
    return Outcome(shared_digest(ours), found, tuple(one.reason for one in train.recompiles))


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_stay_equal_and_follow_pytorch(tmp_path: Path, count: int) -> None:
    # With four ranks on two cores a step is slow: fewer kinds.
    names = list(WORKLOADS) if count == 2 else ["mlp", "gpt2"]

    def program(rank: int) -> dict[str, Outcome]:
        return {name: outcome(name, rank, is_plain=k % 2 == 1) for k, name in enumerate(names)}

    found = ranks(program, tmp_path, count, seconds=300)
    for name in names:
        assert len({of_rank[name].digest for of_rank in found}) == 1, name
        for of_rank in found:
            assert of_rank[name].difference < ORDER, name
            assert not of_rank[name].recompiles, name


def test_plain_models_begin_with_the_parameters_of_rank_0(tmp_path: Path) -> None:
    def program(rank: int) -> tuple[str, str]:
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4))
        model[1].running_mean.fill_(rank)
        one = Training([model], [torch.optim.SGD(model.parameters(), lr=0.0)], print)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            one.optimizers[0].step()
            one.optimizers[0].zero_grad()
            return loss.detach()

        one.step = step
        before = one.digest()
        jitted(one, data_parallel=True)(torch.ones(8, 16))
        return before, one.digest()

    (first, now), (other, also) = ranks(program, tmp_path)
    assert first != other and now == also


def accumulation(rank: int, *, wraps: bool, inside: bool) -> dict[str, Any]:
    """Two backward passes without an exchange, and one with, as PyTorch's users write it."""

    def training() -> tuple[Training, Callable[..., Any], Callable[..., Any]]:
        torch.manual_seed(0)
        model: Any = wrapped(mlp()) if wraps else mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def part(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with model.no_sync() if inside else contextlib.nullcontext():
                loss = F.cross_entropy(model(x), y) / 3
                loss.backward()
            return loss.detach()

        def last(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y) / 3
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Training([model], [optimizer], last), part, last

    ours, part, last = training()
    options: dict[str, Any] = {"model": ours.models, "optimizer": ours.optimizers}
    options["data_parallel"] = not wraps
    parts, lasts = amp_ir.jit(part, **options), amp_ir.jit(last, **options)
    torch.manual_seed(0)
    theirs_model = wrapped(mlp())
    theirs = Training(
        [theirs_model], [torch.optim.SGD(theirs_model.parameters(), lr=0.1, momentum=0.9)], last
    )
    local = 0.0
    for k, (x, y) in enumerate(batches("mlp", 12, rank)):
        is_last = k % 3 == 2
        with contextlib.nullcontext() if is_last else theirs_model.no_sync():
            (F.cross_entropy(theirs_model(x), y) / 3).backward()
        if is_last:
            theirs.optimizers[0].step()
            theirs.optimizers[0].zero_grad()
            lasts(x, y)
            continue
        with contextlib.nullcontext() if inside else parts.no_sync():
            parts(x, y)
        grads = zip(ours.models[0].parameters(), theirs_model.parameters(), strict=True)
        local = max(float((a.grad - b.grad).abs().max()) for a, b in grads)  # type: ignore[operator]
    return {
        "digest": ours.digest(),
        "difference": difference(ours, theirs),
        "local": local,
        "recompiles": len(lasts.recompiles),
        "starts": [c.ops for c in parts.compiled.report.plan.calls if "all_reduce_start" in c.ops],
    }


def test_no_sync_accumulates_on_each_rank(tmp_path: Path) -> None:
    def program(rank: int) -> list[dict[str, Any]]:
        return [
            accumulation(rank, wraps=True, inside=True),
            accumulation(rank, wraps=True, inside=False),
            accumulation(rank, wraps=False, inside=False),
        ]

    first, second = ranks(program, tmp_path, seconds=120)
    for one, other in zip(first, second, strict=True):
        assert one["digest"] == other["digest"]
        assert max(one["difference"], other["difference"]) < ORDER
        # While they accumulate, gradients are each rank's own, as PyTorch's.
        assert max(one["local"], other["local"]) < 1e-6
        assert not one["starts"]


def scaled(
    rank: int, amp_dtype: str, comm_dtype: str | None
) -> tuple[str, list[bool], list[float]]:
    """Train under a loss scale; one rank's batch has an infinity at some steps."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = amp_ir.GradScaler("cpu", init_scale=2.0**12, growth_interval=4)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    one = Training([model], [optimizer], step)
    options = {"amp_dtype": amp_dtype, "comm_dtype": comm_dtype, "scaler": scaler}
    train = jitted(one, data_parallel=True, **options)
    chance = random.Random(7)
    skipped, scales = [], []
    for x, y in batches("mlp", STEPS, rank):
        if chance.random() < 0.2 and chance.randrange(2) == rank:
            x = x.clone()
            x[0, 0] = float("inf") if chance.random() < 0.5 else float("nan")
        else:
            chance.random()
        train(x, y)
        skipped.append(train.skipped)
        scales.append(scaler.get_scale())
    return one.digest(), skipped, scales


def test_an_infinity_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    cases = [("float16", None), ("bfloat16", "bfloat16")]

    def program(rank: int) -> list[Any]:
        return [scaled(rank, *case) for case in cases]

    first, second = ranks(program, tmp_path, seconds=120)
    assert first == second
    for _, skipped, scales in first:
        assert 3 < sum(skipped) < 25
        assert all(
            scale < before
            for skip, scale, before in zip(skipped[1:], scales[1:], scales, strict=False)
            if skip
        )


def precision_of(
    rank: int, make_options: dict[str, Any], hook: Any = None
) -> tuple[str, float, str]:
    """Bits of the state, its distance to float32 in PyTorch, and what the plan says."""
    ours, theirs = WORKLOADS["mlp"][0](wrapped), WORKLOADS["mlp"][0](wrapped)
    if hook is not None:
        ours.models[0].register_comm_hook(None, hook)  # type: ignore[operator]
    train = jitted(ours, **make_options)
    for batch in batches("mlp", 20, rank):
        train(*batch)
        theirs.step(*batch)
    plan = train.compiled.module.plan
    text = "" if plan is None else plan.explain("*all_reduce_start*")
    return ours.digest(), difference(ours, theirs), text


def alone(whole: list[Batch], amp_dtype: str) -> float:
    """The distance of a single process on both ranks' batches to float32 in PyTorch."""
    ours, theirs = WORKLOADS["mlp"][0](not_wrapped), WORKLOADS["mlp"][0](not_wrapped)
    train = jitted(ours, amp_dtype=amp_dtype)
    for batch in whole:
        train(*batch)
        theirs.step(*batch)
    return difference(ours, theirs)


def test_a_low_dtype_between_ranks_is_a_decision_of_the_plan(tmp_path: Path) -> None:
    def program(rank: int) -> list[tuple[str, float, str]]:
        return [
            precision_of(rank, {"comm_dtype": "bfloat16"}),
            precision_of(rank, {"amp_dtype": "bfloat16"}),
            precision_of(rank, {"amp_dtype": "bfloat16", "comm_dtype": "bfloat16"}),
            precision_of(rank, {}, default_hooks.fp16_compress_hook),
        ]

    first, second = ranks(program, tmp_path, seconds=120)
    assert [one[0] for one in first] == [one[0] for one in second]
    pairs = zip(batches("mlp", 20, 0), batches("mlp", 20, 1), strict=True)
    whole = [tuple(torch.cat(both) for both in zip(*pair, strict=True)) for pair in pairs]
    error = alone(whole, "bfloat16")
    only_sent, low, both, hook = first
    # What is sent in bfloat16 is rounded by 2^-9 of it, as each gradient of a step in bfloat16 is.
    assert max(low[1], only_sent[1], hook[1]) < 1.5 * error
    assert both[1] < 2 * error
    for text, dtype in ((only_sent[2], "bfloat16"), (both[2], "bfloat16"), (hook[2], "float16")):
        assert "Selected by Override(to='low', op='amp_ir.all_reduce_*'" in text and dtype in text
    assert "Float32 between ranks" in low[2]


def test_batches_of_other_shapes_and_lengths_need_no_new_agreement(tmp_path: Path) -> None:
    def program(rank: int) -> tuple[str, int, float]:
        def training() -> tuple[Training, nn.Module]:
            torch.manual_seed(0)
            words, last = nn.Embedding(32, 8), nn.Linear(8, 32)
            model = wrapped(nn.Sequential(words, last))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
                loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            return Training([model], [optimizer], step), model

        (ours, _), (theirs, _) = training(), training()
        sizes = {name: {1: (8, 16)} for name in ("ids", "labels")}
        train = jitted(ours, buckets=sizes, pad={"ids": 0, "labels": -100})
        torch.manual_seed(rank)
        # Each rank has its own lengths: it compiles for the second size at another step.
        for length in [(5, 7, 12, 6, 15), (11, 8, 7, 16, 3)][rank]:
            ids = torch.randint(0, 32, (2, length))
            train(ids, ids)
            theirs.step(ids, ids)
        return ours.digest(), len(train.recompiles), difference(ours, theirs)

    (first, one, far), (second, other, away) = ranks(program, tmp_path)
    assert first == second and one == other == 1
    assert max(far, away) < ORDER
