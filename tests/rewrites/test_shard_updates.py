# SPDX-License-Identifier: Apache-2.0
"""Updates that ranks share: each rank's program in a thread, beside the program of one that does
all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import amp_ir
from amp_ir import pipeline
from amp_ir.dialect import options_of
from amp_ir.dialect.collectives import STARTS
from amp_ir.dialect.rank_threads import run_ranks
from amp_ir.distributed.process_group import Group
from amp_ir.distributed.shard_balance import shard_balance
from amp_ir.distributed.shards import GRAIN, Candidate, Shards
from amp_ir.ir.bucket_sizes import BucketSizes
from amp_ir.ir.collective_call import read_collective
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.step_module import Role, StepModule
from amp_ir.rewrites.exchange_gradients import exchange_gradients
from captured_ranks import captured, op_names

BATCH = (torch.ones(4, 16), torch.zeros(4, dtype=torch.int64))


def training(
    *, keeps: bool = False, average: bool = False, width: int = 40
) -> tuple[Any, Any, Any, Callable]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, eps=1e-3)
    scaler = amp_ir.GradScaler("cpu", init_scale=4.0)
    slow = [p.detach().clone() for p in model.parameters()]
    for k, one in enumerate(slow if average else ()):
        model.register_buffer(f"slow{k}", one)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        if average:
            with torch.no_grad():
                for buffer, parameter in zip(model.buffers(), model.parameters(), strict=True):
                    buffer.lerp_(parameter, 0.25)
        if not keeps:
            optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, scaler, step


def program(rank: int, count: int, shard: str = "optimizer", **options: Any) -> StepModule:
    model, optimizer, scaler, step = training(**options)
    mod = captured(
        step, BATCH, [model], [optimizer], count, scaler=scaler, rank=rank, shard=shard
    )  # fmt: skip
    return exchange_gradients(mod)


def results(mod: StepModule, batch: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """What a program computes, by name."""
    rest = iter(batch)
    values = []
    for one in mod.signature.inputs:
        held = next(rest) if one.role is Role.BATCH else mod.state[one.name]
        values.append(held() if callable(held) else held)
    found = interpret(mod.ir, values)
    return {s.name: one for s, one in zip(mod.signature.outputs, found, strict=True)}


def batch_of(rank: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(rank)
    return torch.randn(4, 16), torch.randint(0, 4, (4,))


# A width of 4 makes five times GRAIN elements: the last of six ranks has nothing.
@pytest.mark.parametrize(("count", "width"), [(2, 40), (3, 40), (6, 4)])
def test_ranks_compute_what_one_would(count: int, width: int) -> None:
    split = [program(rank, count, average=True, width=width) for rank in range(count)]
    whole = [program(rank, count, "", average=True, width=width) for rank in range(count)]
    # Made here: the ranks are threads, which share the random state.
    batches = [batch_of(rank) for rank in range(count)]
    ours = run_ranks(count, lambda rank: results(split[rank], batches[rank]))
    theirs = run_ranks(count, lambda rank: results(whole[rank], batches[rank]))[0]
    for name, expected in theirs.items():
        if name.startswith("result"):
            continue  # each rank's own loss
        found = [one[name] for one in ours if name in one]
        if ".exp_avg" in name:
            # Parts of one tensor in the order of the ranks, which may have none.
            found = [torch.cat(found).view(expected.shape)]
        for one in found:
            # The norm is a sum of other parts.
            torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-7)


def test_one_exchange_carries_the_check_and_all_norms() -> None:
    mod = program(0, 2)
    flow = Dataflow(mod.ir)
    calls = [value for value in flow.values.values() if getattr(value, "op", None) is not None]
    starts = [call for call in calls if getattr(call.op, "name", "") in STARTS]
    kinds = [call.op.name.removeprefix("amp_ir.") for call in starts]
    assert kinds == ["reduce_scatter_start", "all_reduce_start", "all_gather_start"]
    assert [options_of(call)["bucket"] for call in starts] == [0, 1, 2]
    # A count of what is not finite, a squared norm, and a norm for each parameter.
    assert len(starts[1].args) == 2 + 4
    assert "relax.strided_slice" in op_names(mod.ir)


def test_a_gradient_that_is_left_is_whole() -> None:
    names = op_names(program(0, 2, keeps=True).ir)
    assert "amp_ir.all_reduce_start" in names and "amp_ir.reduce_scatter_start" not in names


def test_a_range_of_the_arena_is_split() -> None:
    mod = program(1, 2)
    step = pipeline.lower(mod)
    found = [
        read_collective(value)
        for value in Dataflow(step.ir).values.values()
        if read_collective(value) is not None
    ]
    scatter = next(one for one in found if one.kind == "reduce_scatter" and one.places)
    assert scatter.range_size % (2 * GRAIN) == 0
    # All that this rank keeps is in the second half.
    assert all(place >= scatter.range_size // 2 for place in scatter.places)
    sent = [call.sent_nbytes for call in step.plan.calls if call.sent_nbytes]
    assert sent[0] == sent[1] == 4 * scatter.range_size


def test_a_rank_that_holds_nothing_takes_part_in_every_exchange() -> None:
    first, last = (program(rank, 6, width=4) for rank in (0, 5))
    held = [
        sum(one.role is Role.OPTIMIZER_STATE and len(one.shape) > 0 for one in mod.signature.inputs)
        for mod in (first, last)
    ]
    assert held[0] > 0 and held[1] == 0
    begun, of_last = (
        [
            (one.kind, one.bucket, one.range_size)
            for value in Dataflow(pipeline.lower(mod).ir).values.values()
            if (one := read_collective(value)) is not None
        ]
        for mod in (first, last)
    )
    # Each is begun and waited for.
    assert sorted(begun) == sorted(of_last) and len(of_last) == 2 * 3


def test_state_is_an_equal_part_on_a_thousand_ranks() -> None:
    for count in (2, 64, 1000, 1024):
        model, optimizer, scaler, step = training(width=4099)
        mod = captured(
            step, BATCH, [model], [optimizer], count, scaler=scaler, rank=count - 1,
            shard="optimizer",
        )  # fmt: skip
        balance = shard_balance(mod, mod.hooks.ranks.shards)
        assert balance is not None and balance.excess_nbytes == 0
        # One number a parameter is whole, and the rest a multiple of GRAIN elements.
        assert balance.most_nbytes <= balance.nbytes / count + 4 * 4 + 8 * GRAIN
        assert exchange_gradients(mod).notes == mod.notes


def test_a_rank_that_holds_more_than_its_part_is_told() -> None:
    model, optimizer, scaler, step = training(width=4)
    mod = captured(
        step, BATCH, [model], [optimizer], 1024, scaler=scaler, shard="optimizer"
    )  # fmt: skip
    (note,) = exchange_gradients(mod).notes[len(mod.notes) :]
    assert note == (
        "shard='optimizer' over 1024 ranks leaves 272 bytes of the optimizers' 720 bytes on rank "
        "3, more than 1 / 1024 and 2% of all: a rank's part of a bucket is a multiple of 32 "
        "elements"
    )


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=12),
    st.one_of(st.integers(2, 5), st.integers(2, 1024)),
    st.integers(256, 40000),
    st.integers(0, 4000),
)
def test_parts_of_all_ranks_are_the_whole(
    sizes: list[int], count: int, nbytes: int, last: int
) -> None:
    wanted = BucketSizes(nbytes, nbytes, last)
    parameters = [torch.empty(size) for size in sizes]
    shards = [Shards("optimizer", [Group(None, rank, count, 1.0)]) for rank in range(count)]
    for one in shards:
        one.lay_out([Candidate(p, 0, ("alike",), wanted) for p in parameters])
    for parameter in parameters:
        places = [one.place_of(parameter) for one in shards]
        if places[0] is None:
            # All that may share a bucket are one rank's.
            assert sum(sizes) <= GRAIN
            continue
        assert places[0].first == 0 and places[-1].end == parameter.numel()
        assert all(a.end == b.first for a, b in zip(places, places[1:], strict=False))
        for rank, place in enumerate(places):
            if place.end > place.first:
                begin = place.offset + place.first
                assert begin % GRAIN == 0
                size = place.bucket.part_size
                assert rank * size <= begin and place.offset + place.end <= (rank + 1) * size
    for bucket in shards[0].buckets:
        assert bucket.part_size <= bucket.end / count + GRAIN
