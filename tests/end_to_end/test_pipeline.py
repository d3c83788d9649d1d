# SPDX-License-Identifier: Apache-2.0
"""The whole way: compile, jit, profile and peak memory on one small step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import amp_ir
from amp_ir import errors
from amp_ir.api import lower


def training(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    """A small network with every kind of state, its optimizer and its step."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        # No bias before BatchNorm: its gradient is 0 but for rounding, which Adam would amplify.
        layers = (
            torch.nn.Linear(6, 10, bias=False),
            torch.nn.BatchNorm1d(10),
            torch.nn.GELU(),
            torch.nn.Linear(10, 3),
        )
        model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


def batch(rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 6, generator=generator)
    return x, torch.randint(0, 3, (rows,), generator=generator)


def assert_same_state(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    # Adam's first steps have size lr whatever the gradient: differences are of lr times rounding.
    for (name, a), b in zip(
        ours.state_dict().items(), theirs.state_dict().values(), strict=True
    ):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)


def test_a_compiled_step_trains_as_pytorch_does_under_a_scheduler() -> None:
    model, optimizer, step = training()
    peer, peer_optimizer, peer_step = training()
    mod, _ = amp_ir.trace_step(step, batch(), model=model, optimizer=optimizer)
    train = amp_ir.compile(mod)
    addresses = [p.data_ptr() for p in model.parameters()]
    schedules = [
        torch.optim.lr_scheduler.ExponentialLR(one, 0.7) for one in (optimizer, peer_optimizer)
    ]
    for _ in range(5):
        assert torch.isclose(train(*batch()), peer_step(*batch()), rtol=1e-5)
        for schedule in schedules:
            schedule.step()
    assert_same_state(model, peer)
    assert addresses == [p.data_ptr() for p in model.parameters()]
    ours, theirs = optimizer.state_dict()["state"], peer_optimizer.state_dict()["state"]
    assert ours[0]["step"] == theirs[0]["step"] == 5
    torch.testing.assert_close(ours[0]["exp_avg"], theirs[0]["exp_avg"], rtol=1e-4, atol=1e-6)


def test_a_checkpoint_moves_training_to_plain_pytorch_and_back() -> None:
    model, optimizer, step = training()
    peer, peer_optimizer, peer_step = training(seed=1)
    mod, _ = amp_ir.trace_step(step, batch(), model=model, optimizer=optimizer)
    train = amp_ir.compile(mod)
    train(*batch())
    peer.load_state_dict(copy.deepcopy(model.state_dict()))
    peer_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.isclose(train(*batch()), peer_step(*batch()), rtol=1e-5)
    assert torch.isclose(train(*batch()), peer_step(*batch()), rtol=1e-5)
    model.load_state_dict(peer.state_dict())
    assert torch.isclose(train(*batch()), peer_step(*batch()), rtol=1e-4)


def test_profiling_changes_nothing_and_gives_an_entry_a_repeat() -> None:
    model, optimizer, step = training()
    mod, args = amp_ir.trace_step(step, batch(), model=model, optimizer=optimizer)
    before = copy.deepcopy(model.state_dict())
    times = amp_ir.profile_vm_model(mod, "cpu", args, warmup=1, number=2, repeat=3)
    assert len(times) == 3 and all(t > 0 for t in times)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(),
                                                 strict=True))  # fmt: skip
    assert not optimizer.state


def test_peak_memory_is_the_plan_and_parameters_can_be_left_out() -> None:
    model, optimizer, step = training()
    mod, args = amp_ir.trace_step(step, batch(), model=model, optimizer=optimizer)
    plan = lower(mod).plan
    assert amp_ir.get_peak_memory(mod, "cpu", args) == plan.peak_bytes / 2**20
    without = amp_ir.get_peak_memory(mod, "cpu", args, include_param=False)
    assert without == (plan.peak_bytes - plan.state_bytes) / 2**20
    state = [*model.parameters(), *model.buffers()]
    nbytes = sum(t.numel() * t.element_size() for t in state)
    # Each parameter has two moments and a step count (float32) besides itself.
    moments = sum(2 * p.numel() * 4 + 4 for p in model.parameters())
    scalars = plan.state_bytes - nbytes - moments
    assert 0 < scalars <= 64 and scalars % 8 == 0
    assert plan.arena_bytes >= plan.lower_bound_bytes > 0
    assert not optimizer.state


def test_low_precision_needs_less_memory_for_activations() -> None:
    # Large: a library's workspace (1 MiB for bfloat16 on a CPU with AMX) is a small share.
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    mod, args = amp_ir.trace_step(step, (torch.randn(8192, 64),), model=model, optimizer=optimizer)
    amp = amp_ir.autocast(mod, args, amp_dtype="bfloat16")
    full = amp_ir.get_peak_memory(mod, "cpu", args, include_param=False)
    assert amp_ir.get_peak_memory(amp, "cpu", args, include_param=False) < 0.8 * full


def test_jit_compiles_again_for_another_shape() -> None:
    model, optimizer, step = training()
    peer, _, peer_step = training()
    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    assert train.compiled is None
    for rows in (5, 7, 5, 7):
        assert torch.isclose(train(*batch(rows)), peer_step(*batch(rows)), rtol=1e-4)
    assert [one.reason for one in train.recompiles] == [
        "argument 0 was of shape (5, 6) and is of shape (7, 6) (dimension 0); "
        "argument 1 was of shape (5,) and is of shape (7,) (dimension 0)"
    ]
    assert_same_state(model, peer)


def test_jit_follows_a_parameter_that_is_frozen_between_steps() -> None:
    model, optimizer, step = training()
    peer, _, peer_step = training()
    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    for frozen in (False, True):
        for one in (model, peer):
            one[0].weight.requires_grad_(not frozen)
        assert torch.isclose(train(*batch()), peer_step(*batch()), rtol=1e-4)
    assert_same_state(model, peer)


def test_a_compiled_step_refuses_a_model_that_changed() -> None:
    model, optimizer, step = training()
    mod, _ = amp_ir.trace_step(step, batch(), model=model, optimizer=optimizer)
    train = amp_ir.compile(mod)
    train(*batch())
    before = copy.deepcopy(model.state_dict())
    model[0].weight.requires_grad_(False)
    with pytest.raises(errors.StateError) as refused:
        train(*batch())
    assert str(refused.value) == (
        "the step is no longer as it was captured: parameter 0.weight was trained and is frozen. "
        "Call amp_ir.trace_step and amp_ir.compile again, or use amp_ir.jit, which does"
    )
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(),
                                                 strict=True))  # fmt: skip


def test_the_report_names_each_stage() -> None:
    model, optimizer, step = training()
    mod, _ = amp_ir.trace_step(step, batch(), model=model, optimizer=optimizer)
    train = amp_ir.compile(mod)
    assert list(train.report.seconds) == [
        "checks",
        "decompose",
        "dispatch",
        "loops",
        "memory",
        "vm",
    ]
    assert "kernels, peak" in repr(train)


def test_a_batch_may_lie_anywhere_in_memory() -> None:
    """A slice of a data set starts where it starts, and an array of NumPy's where it likes."""
    model = torch.nn.Linear(5, 3)
    data = torch.randn(1 + 4 * 5)

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x).sum().detach()

    train = amp_ir.jit(step, model=model)
    for start in range(2):
        x = data[start : start + 20].view(4, 5)
        torch.testing.assert_close(train(x), model(x).sum().detach())
        assert x.data_ptr() % 64 == 4 * start
