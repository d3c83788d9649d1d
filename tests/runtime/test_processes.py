# SPDX-License-Identifier: Apache-2.0
"""Steps in forked processes and beside them, and training that several processes share."""

from __future__ import annotations

import multiprocessing
import os
import threading
import warnings
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
from rank_processes import of_child, ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
FORK = multiprocessing.get_context("fork")


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


APART = (
    "torch.distributed has a group of 2 processes, and this step exchanges nothing with the "
    "others: each rank trains a model of its own. Pass data_parallel=True, or a "
    "DistributedDataParallel in model= that the step calls"
)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_ranks_that_train_apart_are_warned_once(tmp_path: Path) -> None:
    def program(rank: int) -> tuple[list[str], float]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model, train = jitted()
            for _ in range(2):
                train(BATCH[0] * (1 + rank), BATCH[1])
            jitted()[1](*BATCH)
        told = [str(one.message) for one in caught if one.category is UserWarning]
        return told, float(model[0].weight.detach().sum())

    (first, one), (second, other) = ranks(program, tmp_path)
    assert first == second == [APART]
    assert one != other


@pytest.fixture
def group_of_one(tmp_path: Path) -> Any:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_wrapper_is_captured_as_its_module(group_of_one: None) -> None:
    model, step, optimizer = training()
    wrapped = nn.parallel.DistributedDataParallel(model)

    def calls_wrapped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(wrapped(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    _, expected, _ = training()
    train = amp_ir.jit(calls_wrapped, model=wrapped, optimizer=optimizer)
    for _ in range(3):
        assert float(train(*BATCH)) == pytest.approx(float(expected(*BATCH)), rel=1e-5)
    # One rank exchanges nothing.
    assert "all_reduce" not in train.ir("loops")
    assert set(train.compiled.module.state) >= {"0.weight", "2.bias"}

    with pytest.raises(errors.CaptureError) as failed:
        amp_ir.jit(calls_wrapped, model=model, optimizer=optimizer)(*BATCH)
    line = calls_wrapped.__code__.co_firstlineno + 1
    assert str(failed.value) == (
        "this step cannot be captured, 1 place:\n"
        f"  1. step (forward), {__file__}:{line}: the step calls a module that is a "
        "DistributedDataParallel that was not passed in model=, so its exchange between processes "
        "would be left out. Pass it there"
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "FullyShardedDataParallel",
            "is a FullyShardedDataParallel, whose parameters a rank holds in part, which a "
            "compiled step does not follow; use DistributedDataParallel or data_parallel=True, "
            "where each rank holds all",
        ),
        (
            "DataParallel",
            "is a DataParallel, whose copies on other devices a compiled step does not run; start "
            "a process for each device with torchrun, and use DistributedDataParallel or "
            "data_parallel=True",
        ),
    ],
)
def test_other_wrappers_are_refused_with_what_to_use(name: str, expected: str) -> None:
    model, step, optimizer = training()
    wrapper = type(name, (nn.Sequential,), {})(model)
    with pytest.raises(errors.ArgumentError) as error:
        amp_ir.jit(step, model=wrapper, optimizer=optimizer)
    assert str(error.value) == f"model= (itself) {expected}"


def test_a_group_that_is_made_after_the_capture_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_of_one: None
) -> None:
    model, step, optimizer = training()
    mod, _ = amp_ir.trace_step(step, BATCH, model=model, optimizer=optimizer)
    train, compiled = amp_ir.jit(step, model=model, optimizer=optimizer), amp_ir.compile(mod)
    train(*BATCH)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    why = "torch.distributed has a group of 2 processes now"
    with pytest.warns(UserWarning, match="each rank trains a model of its own"):
        train(*BATCH)
    assert [one.reason for one in train.recompiles] == [why]
    with pytest.raises(errors.StateError) as failed:
        compiled(*BATCH)
    assert str(failed.value).startswith(f"the step is no longer as it was captured: {why}")
