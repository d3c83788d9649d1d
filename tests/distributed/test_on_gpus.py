# SPDX-License-Identifier: Apache-2.0
"""Ranks on GPUs, emulated: two processes with an emulated device each, gloo in NCCL's place.

Each emulating process is one rank. NCCL itself, and its graphs, need a GPU.
"""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import amp_ir
from amp_ir import pipeline
from amp_ir.api.trace import rewrite, trace_unchanged
from amp_ir.dialect.collectives import START_SYMBOL
from amp_ir.distributed import meeting, process_group
from amp_ir.distributed.process_group import Group
from amp_ir.distributed.rank_options import check_exchange
from amp_ir.distributed.replicas import Ranks, Replica, find_ranks
from amp_ir.errors import DeviceError, IndexOutOfRangeError, RankFailedError, RanksDifferError
from amp_ir.ir import target
from cuda_emulator.client import Worker
from data_parallel import WORKLOADS, batches

IS_ABLE = platform.machine() == "x86_64" and sys.platform == "linux" and shutil.which("g++")
pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(not IS_ABLE, reason="needs g++ on x86-64 Linux"),
]
STEPS = 5


OnTwoRanks = Callable[..., None]


@pytest.fixture(scope="module")
def on_two_ranks() -> Iterator[OnTwoRanks]:
    """Run `program(rank, folder, ...)` in two emulating processes, which serve all tests."""
    workers = [Worker(), Worker()]

    def on_both(program: Any, folder: Path, *arguments: Any) -> None:
        def run(rank: int) -> None:
            given = {"rank": rank, "folder": str(folder), "arguments": arguments}
            workers[rank].run(program.__module__, program.__qualname__, given)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(run, range(2)))

    yield on_both
    for one in workers:
        one.stop()


def begin(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    if dist.is_initialized():  # by a test that failed
        dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", 2)
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)


def not_wrapped(model: nn.Module) -> nn.Module:
    return model


def trained(one: Any, name: str, rank: int, **options: Any) -> Any:
    train = amp_ir.jit(
        one.step, model=one.models, optimizer=one.optimizers, data_parallel=True, **options
    )
    for batch in batches(name, STEPS, rank):
        train(*batch)
    return train


def train_workloads(rank: int, folder: str, arguments: tuple[Any, ...]) -> None:
    from cuda_emulator import as_cuda, nccl

    begin(rank, folder)
    options = dict(arguments)
    # What another test has left, which nothing has freed yet.
    earlier = set(process_group._recorded)
    for name in ("mlp", "resnet"):
        make, _ = WORKLOADS[name]
        ours, host = make(not_wrapped), make(not_wrapped)
        with as_cuda.as_cuda(), nccl.installed():
            train = trained(ours, name, rank, device="cuda", **options)
            train.compiled.synchronise()
            # What ran last is one graph with its collectives.
            assert train.compiled.program.is_graph
        trained(host, name, rank, device="cpu", **options)
        for key, value in host.state().items():
            # Sums in another order; AdamW divides small gradients by their size.
            torch.testing.assert_close(ours.state()[key], value, rtol=2e-3, atol=2e-4)
        digests: list[Any] = [None, None]
        state = {key: one for key, one in ours.state().items() if "running" not in key}
        dist.all_gather_object(digests, {key: one.double().sum() for key, one in state.items()})
        if options.get("shard") is None:
            assert digests[0] == digests[1], name
        dist.barrier()
        recorded = set(process_group._recorded) - earlier
        assert recorded and all(one.is_recorded for one in recorded)
    torch.distributed.destroy_process_group()
    assert not any(one.is_recorded for one in recorded)


@pytest.mark.parametrize("options", [{}, {"shard": "optimizer"}], ids=["whole", "sharded"])
def test_two_gpus_train_as_two_cpus_with_the_exchange_in_their_graphs(
    options, tmp_path, on_two_ranks
):
    on_two_ranks(train_workloads, tmp_path, *options.items())


def meet_overflows_and_bad_indices(rank: int, folder: str, arguments: Any) -> None:
    from cuda_emulator import as_cuda, nccl

    begin(rank, folder)
    torch.manual_seed(0)
    table, head = nn.Embedding(6, 4), nn.Linear(4, 1)
    model = nn.ModuleList([table, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = amp_ir.GradScaler("cpu", init_scale=2.0**8)

    def step(ids: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        loss = (head(table(ids)) * factor).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    def values() -> list[torch.Tensor]:
        train.compiled.synchronise()
        return [one.detach().clone() for one in model.parameters()]

    good, one = torch.tensor([0, 5, 1]), torch.ones(())
    with as_cuda.as_cuda(), nccl.installed():
        owners = {"model": model, "optimizer": optimizer, "scaler": scaler}
        options = {"device": "cuda", "amp_dtype": "float16", "data_parallel": True}
        train = amp_ir.jit(step, **owners, **options)
        for _ in range(3):
            train(good, one)
        before, scale = values(), scaler.get_scale()
        # An infinity on one rank: both skip.
        train(good, one * float("inf") if rank == 0 else one)
        assert all(map(torch.equal, before, values()))
        assert scaler.get_scale() == scale / 2
        # An index out of range on one rank: both raise at the second call after it.
        train(good + rank, one)
        assert all(torch.equal(a, b) for a, b in zip(before, [*model.parameters()], strict=True))
        train(good, one)
        before = [one.detach().clone() for one in model.parameters()]
        expected = IndexOutOfRangeError if rank == 1 else RankFailedError
        with pytest.raises(expected):
            train(good, one)
        assert all(map(torch.equal, before, values()))
        train(good, one)
        assert not all(map(torch.equal, before, values()))
        sums: list[Any] = [None, None]
        dist.all_gather_object(sums, [one.double().sum().item() for one in values()])
        assert sums[0] == sums[1]
        # A rank at another step: both say so before anything is exchanged.
        other = amp_ir.jit(lambda x: step(x, one), **owners, **options)
        other(good)
        with pytest.raises(RanksDifferError, match="are at different steps in its call"):
            other(good) if rank else train(good, one)
    dist.destroy_process_group()


def test_two_gpus_skip_raise_and_differ_together(tmp_path, on_two_ranks):
    on_two_ranks(meet_overflows_and_bad_indices, tmp_path)


def test_the_check_of_a_batch_in_the_step_begins_before_what_is_sent_first():
    """An exchange of the check comes first on all ranks, so no kernel may put it last."""
    make, _ = WORKLOADS["resnet"]
    one = make(not_wrapped)
    models, ranks = find_ranks(one.models, simulated=Group(None, 0, 2, 30.0))
    batch = next(iter(batches("resnet", 1, 0)))
    captured = trace_unchanged(one.step, batch, model=models, optimizer=one.optimizers, ranks=ranks)
    planned = pipeline.lower(rewrite(captured), target=target.cuda("sm_90"))
    begun = [call.ops[0] for call in planned.plan.calls if call.symbol == START_SYMBOL]
    expected = ["all_reduce_start", *["broadcast_start"] * 2, "all_reduce_start"]
    assert begun == expected


class NoHostTensors:
    """A group of NCCL alone: a store, and no backend for tensors of the host."""

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank, self.size = store, rank, 2


@pytest.mark.parametrize("digests", ["aa", "ab"])
def test_ranks_meet_through_the_store_and_leave_nothing_in_it(digests):
    store = dist.HashStore()
    calls = []
    for rank, digest in enumerate(digests):
        if calls:
            assert not calls[0].is_done()
        group = NoHostTensors(store, rank)
        calls.append(meeting._StoreRollCall(group, digest, lambda name: f"call/1/{name}"))
    assert all(one.is_done() for one in calls)
    assert [one.are_alike() for one in calls] == [digests == "aa"] * 2
    calls[0].forget()
    assert store.num_keys() == 0


def test_what_a_group_cannot_exchange_is_refused_with_what_to_call(monkeypatch):
    group = Group(None, 0, 2, 30.0)
    ranks = Ranks([], [Replica(nn.Linear(2, 2), group)], [group])
    backends = {"cpu": "gloo", "cuda": "gloo"}
    monkeypatch.setattr(Group, "backend_for", lambda self, device_type: backends[device_type])
    with pytest.raises(DeviceError) as caught:
        check_exchange(ranks, is_cuda=True, amp_dtype=None)
    assert str(caught.value) == (
        'device="cuda" exchanges gradients with NCCL, and the process group has gloo for CUDA '
        'tensors: call init_process_group("cpu:gloo,cuda:nccl") or init_process_group("nccl"), and '
        "torch.cuda.set_device(local_rank) before it"
    )
    backends.update(cpu="", cuda="nccl")
    with pytest.raises(DeviceError) as caught:
        check_exchange(ranks, is_cuda=False, amp_dtype=None)
    assert str(caught.value) == (
        'the process group exchanges no CPU tensors, and the step runs with device="cpu": call '
        'init_process_group("gloo") or init_process_group("cpu:gloo,cuda:nccl"), or move the model '
        'to a GPU and pass device="cuda"'
    )
    check_exchange(ranks, is_cuda=True, amp_dtype=None)
