# SPDX-License-Identifier: Apache-2.0
"""One arena for all programs of a step: as large as the largest needs, and none left behind."""

from __future__ import annotations

import copy
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir
from amp_ir.runtime.arena import Arena
from cuda_emulator import in_emulator

CPU = torch.device("cpu")
# float32 and a few steps: a few roundings of 2^-24 each, in sums of up to 48 terms.
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
ROWS = (4, 16, 2, 48, 16, 4)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Dropout(0.0), nn.Linear(32, 3))


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def batch(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=draws)
    return x, torch.randint(0, 3, (rows,), generator=draws)


def check_alternating_shapes(**options: Any) -> Any:
    """Train on batches of ROWS in turns, ours and PyTorch; return our step."""
    ours = network()
    theirs = copy.deepcopy(ours)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, theirs)]
    train = amp_ir.jit(step_of(ours, optimizers[0]), model=ours, optimizer=optimizers[0], **options)
    expected = step_of(theirs, optimizers[1])
    for k, rows in enumerate(ROWS * 3):
        x, y = batch(rows, k)
        torch.testing.assert_close(train(x, y), expected(x, y), **CLOSE)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    assert len(train.recompiles) == len(set(ROWS)) - 1
    return train


def arenas_of(programs: list[Any]) -> set[int]:
    return {id(one.program._arena) for one in programs}


def test_shapes_in_turns_train_in_the_arena_of_the_largest() -> None:
    train = check_alternating_shapes()
    programs = [one.program for one in train._variants._recent]
    sizes = {one.program.plan.arena_bytes for one in programs}
    assert len(arenas_of(programs)) == 1 and len(sizes) == len(set(ROWS))
    assert train._arena.nbytes == max(sizes)


@in_emulator
def test_shapes_in_turns_train_as_graphs_in_one_arena() -> None:
    from cuda_emulator import as_cuda

    with as_cuda.as_cuda():
        train = check_alternating_shapes(device="cuda")
        programs = [one.program for one in train._variants._recent]
        assert len(arenas_of(programs)) == 1
        # Each was recorded again after the arena had grown, and no later.
        assert all(one.program.is_graph for one in programs)


def test_memory_that_is_too_small_is_given_back() -> None:
    arena = Arena()
    first = arena.view(64, CPU, lambda memory: memory)
    assert arena.view(64, CPU, lambda memory: memory) is first
    gone = weakref.ref(first)
    del first
    larger = arena.view(128, CPU, lambda memory: memory)
    assert gone() is None and arena.nbytes == larger.numel() == 128
    assert arena.view(64, CPU, lambda memory: memory).data_ptr() == larger.data_ptr()


def test_an_arena_without_memory_can_be_used_again() -> None:
    arena = Arena()
    arena.view(64, CPU, lambda memory: memory)
    with pytest.raises(RuntimeError, match="memory"):
        arena.view(2**60, CPU, lambda memory: memory)
    assert arena.nbytes == 0
    assert arena.view(32, CPU, lambda memory: memory).numel() == 32


def test_a_program_waits_for_another_in_its_arena() -> None:
    # `train.compiled` is a CompiledStep that another thread may call beside the jitted step.
    ours, theirs = network(), network()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.0)
    train = amp_ir.jit(step_of(ours, optimizer), model=ours, optimizer=optimizer)
    plain = step_of(theirs, torch.optim.SGD(theirs.parameters(), lr=0.0))
    small, large = batch(512, 0), batch(2048, 1)
    train(*small)
    compiled = train.compiled
    train(*large)
    expected = plain(*small), plain(*large)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(compiled(*small) for _ in range(50)))
    thread.start()
    losses = [train(*large) for _ in range(50)]
    thread.join()
    for got, wanted in ((found, expected[0]), (losses, expected[1])):
        assert len(got) == 50
        for one in got:
            torch.testing.assert_close(one, wanted, **CLOSE)


def test_a_converted_model_and_a_loaded_one_have_one_arena(tmp_path: Path) -> None:
    model = network().eval()
    converted = amp_ir.convert_model(model, (torch.zeros(4, 6),), "float32")
    for rows in ROWS:
        converted(torch.zeros(rows, 6))
    amp_ir.save(converted, tmp_path / "model.amp")
    loaded = amp_ir.load(tmp_path / "model.amp")
    for one in (converted, loaded):
        assert len(one.programs) == len(set(ROWS)) and len(arenas_of(one.programs)) == 1
        for rows in ROWS:
            x = torch.randn(rows, 6)
            torch.testing.assert_close(one(x), model(x), **CLOSE)
