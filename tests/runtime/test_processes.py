# SPDX-License-Identifier: Apache-2.0
"""Steps in forked processes and beside them, and training that several processes share."""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import amp_ir
from amp_ir import errors
from amp_ir.host.fork_safe_lock import ForkSafeLock
from amp_ir.vm.build import LIBRARIES

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
FORK = multiprocessing.get_context("fork")
ADVICE = (
    "rain it in plain PyTorch; or train in one process, and let the step use and model= be the "
    "module without the wrapper"
)


def training() -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, step, optimizer


def jitted() -> tuple[nn.Module, Any]:
    model, step, optimizer = training()
    return model, amp_ir.jit(step, model=model, optimizer=optimizer)


BATCH = torch.linspace(-1, 1, 128 * 64).view(128, 64), torch.arange(128) % 3


def of_child(function: Callable[[], Any], seconds: float = 25) -> Any:
    """What a function returns in a forked process; a hang is a failure."""
    receiver, sender = FORK.Pipe(duplex=False)

    def run() -> None:
        try:
            sender.send((function(), ""))
        except BaseException:
            sender.send((None, traceback.format_exc()))

    child = FORK.Process(target=run)
    child.start()
    try:
        assert receiver.poll(seconds), "the forked process hangs"
        value, error = receiver.recv()
        assert not error, error
        return value
    finally:
        child.join(5)
        if child.is_alive():
            child.kill()
            child.join()


@pytest.fixture
def two_threads() -> Any:
    """As by default on any machine: OpenMP has threads, which a fork does not copy."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("compiles", ["before", "there"])
def test_a_step_is_right_in_a_forked_process(two_threads: None, compiles: str) -> None:
    _, step, _ = training()
    expected = [float(step(*BATCH)) for _ in range(4)]
    _, train = jitted()
    losses = [float(train(*BATCH)) for _ in range(2)]
    batch = BATCH
    if compiles == "there":
        batch = tuple(one.clone() for one in BATCH)  # type: ignore[assignment]
        train._variants = type(train._variants)(8, 16, train._variants._users)
        LIBRARIES.clear()  # else the child finds the machine code of the parent
    there = of_child(lambda: [float(train(*batch)) for _ in range(2)])
    here = [float(train(*BATCH)) for _ in range(2)]
    torch.testing.assert_close(losses + there, expected, rtol=1e-4, atol=1e-6)
    assert here == pytest.approx(there, rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_workers_of_a_data_loader_are_forked_between_steps(two_threads: None) -> None:
    data = TensorDataset(*BATCH)
    loader = DataLoader(data, batch_size=64, num_workers=2, multiprocessing_context="fork")
    _, step, _ = training()
    _, train = jitted()
    train(*BATCH), step(*BATCH)
    for _ in range(2):
        for x, y in loader:
            assert float(train(x, y)) == pytest.approx(float(step(x, y)), rel=1e-4)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_in_the_middle_of_a_step_is_told(two_threads: None) -> None:
    lock, held, free = ForkSafeLock("the step was running"), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            free.wait(60)

    def take() -> str:
        try:
            with lock:
                return "taken"
        except errors.StateError as error:
            return str(error)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    told = of_child(take)
    free.set()
    thread.join()
    assert told == (
        "the step was running in another thread while this process was forked, and will not end "
        "here; fork between two steps, or start the process with the spawn method"
    )
    assert of_child(take) == take() == "taken"


def ranks(program: Callable[[], str], folder: Path, count: int = 2) -> list[str]:
    """What each of `count` gloo processes answers."""

    def of_rank(number: int) -> str:
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), count)
        dist.init_process_group("gloo", store=store, rank=number, world_size=count)
        told = program()
        if dist.is_initialized():
            dist.destroy_process_group()
        return told

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda k: of_child(functools.partial(of_rank, k)), range(count)))


def refused(function: Callable[[], Any]) -> str:
    try:
        function()
    except errors.AmpIrError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def all_ways_to_share_training() -> str:
    """In each of two processes: a group, and the wrapper, passed or only called."""
    model, step, optimizer = training()
    wrapped = nn.parallel.DistributedDataParallel(model)

    def calls_wrapped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(wrapped(x), y)
        loss.backward()
        optimizer.step()
        return loss

    mod_of = functools.partial(amp_ir.trace_step, optimizer=optimizer)
    told = [
        refused(lambda: amp_ir.jit(step, model=model, optimizer=optimizer)),
        refused(lambda: mod_of(calls_wrapped, BATCH, model=model)),
        refused(lambda: amp_ir.trace_model(model, BATCH[:1])),
    ]
    # The advice: without the group each process trains for itself.
    dist.destroy_process_group()
    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    train(*BATCH)
    return "\n".join(told)


GROUP = (
    "ArgumentError: torch.distributed has a group of 2 processes, and a compiled step exchanges "
    "nothing with the others: train in plain PyTorch; or, where each process trains for itself, "
    "call torch.distributed.destroy_process_group() first"
)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_training_that_two_processes_share_is_refused_in_each(tmp_path: Path) -> None:
    assert ranks(all_ways_to_share_training, tmp_path) == ["\n".join([GROUP] * 3)] * 2


@pytest.fixture
def group_of_one(tmp_path: Path) -> Any:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_wrapper_is_refused_where_it_is_passed_and_where_it_is_called(
    group_of_one: None,
) -> None:
    model, step, optimizer = training()
    wrapped = nn.parallel.DistributedDataParallel(model)
    reason = "is a DistributedDataParallel, whose exchange between processes a compiled step would"
    with pytest.raises(errors.ArgumentError) as error:
        amp_ir.jit(step, model=wrapped, optimizer=optimizer)
    assert str(error.value) == f"model= (itself) {reason} leave out; t{ADVICE}"

    def calls_wrapped(x: torch.Tensor) -> torch.Tensor:
        return wrapped(x).sum()

    with pytest.raises(errors.CaptureError) as failed:
        amp_ir.jit(calls_wrapped, model=model)(BATCH[0])
    line = calls_wrapped.__code__.co_firstlineno + 1
    assert str(failed.value) == (
        "this step cannot be captured, 1 place:\n"
        f"  1. step (forward), {__file__}:{line}: the step calls a module that {reason} leave out. "
        f"T{ADVICE}"
    )
    # One process, the module itself: as advised.
    amp_ir.jit(step, model=model, optimizer=optimizer)(*BATCH)


def test_a_group_that_is_made_after_the_capture_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_of_one: None
) -> None:
    model, step, optimizer = training()
    mod, _ = amp_ir.trace_step(step, BATCH, model=model, optimizer=optimizer)
    train, compiled = amp_ir.jit(step, model=model, optimizer=optimizer), amp_ir.compile(mod)
    train(*BATCH)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(errors.ArgumentError) as error:
        train(*BATCH)
    assert f"ArgumentError: {error.value}" == GROUP
    with pytest.raises(errors.StateError) as failed:
        compiled(*BATCH)
    assert str(failed.value).startswith(
        "the step is no longer as it was captured: torch.distributed has a group of 2 processes now"
    )
