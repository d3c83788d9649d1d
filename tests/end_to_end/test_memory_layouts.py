# SPDX-License-Identifier: Apache-2.0
"""Parameters, gradients and optimizer state that are not contiguous: channels_last, transposed.

A step works on the user's own tensors, whatever the order of their dimensions in memory, and makes
state of the strides that PyTorch gives it.
"""

from __future__ import annotations

import copy
import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir import pipeline
from amp_ir.errors import ArgumentError, StateError
from amp_ir.ir.target import cpu
from amp_ir.vm import build, export
from permuted_models import (
    EACH,
    LAST,
    MODELS,
    OPTIMIZERS,
    Training,
    assert_alike,
    batch,
    images,
    permuted,
    tensors_of,
    two,
)
from standalone_runs import STEPS, run_alone, write_batch


# An optimizer sees parameters and gradients, whose orders in memory one model has all of.
@pytest.mark.parametrize(
    ("model", "optimizer"),
    [*((model, "momentum") for model in MODELS), *(("each", one) for one in OPTIMIZERS)],
)
def test_steps_are_those_of_pytorch_on_the_same_memory(model: str, optimizer: str) -> None:
    make, shape = {**MODELS, **EACH}[model]
    ours, theirs = two(make, OPTIMIZERS[optimizer], clips=True)
    orders = {one.ndim for one in ours.model.parameters() if not one.is_contiguous()}
    assert orders and (model != "each" or orders == {2, 3, 4, 5})
    memory = [(one.data_ptr(), one.stride()) for one in ours.model.parameters()]
    train = ours.jit()
    for seed in range(3):
        torch.testing.assert_close(train(batch(shape, seed)), theirs(batch(shape, seed)))
    assert memory == [(one.data_ptr(), one.stride()) for one in ours.model.parameters()]
    assert_alike(ours, theirs)
    # Eager steps go on from there, and compiled ones from those, without compiling.
    compiled = len(train.recompiles)
    ours(batch(shape, 3)), theirs(batch(shape, 3))
    train(batch(shape, 4)), theirs(batch(shape, 4))
    assert_alike(ours, theirs)
    assert len(train.recompiles) == compiled


@pytest.mark.filterwarnings("ignore:grad and param do not obey")  # PyTorch's, of the last step
@pytest.mark.parametrize("model", MODELS)
def test_gradients_that_stay_have_the_layout_of_their_parameters(model: str) -> None:
    make, shape = MODELS[model]
    ours, theirs = two(make, OPTIMIZERS["sgd"], keeps=True)
    train = ours.jit()
    for seed in range(3):  # the second accumulates
        train(batch(shape, seed)), theirs(batch(shape, seed))
        assert_alike(ours, theirs)
    assert len(train.recompiles) == 1
    assert any(not one.grad.is_contiguous() for one in ours.model.parameters())
    # A gradient of another layout is another program's.
    for training in (ours, theirs):
        for one in training.model.parameters():
            one.grad = one.grad.contiguous()
    train(batch(shape)), theirs(batch(shape))
    assert_alike(ours, theirs)
    assert "and is contiguous" in train.recompiles[-1].reason


@pytest.mark.parametrize("model", MODELS)
def test_a_skipped_step_changes_nothing(model: str) -> None:
    make, shape = MODELS[model]
    ours, theirs = two(make, OPTIMIZERS["adamw"])
    ours.scaler, theirs.scaler = (amp_ir.GradScaler(init_scale=2.0**8) for _ in range(2))
    train = ours.jit(amp_dtype="float16")
    train(batch(shape))
    before = {name: one.clone() for name, one in tensors_of(ours).items()}
    x = batch(shape)
    x.view(-1)[0] = float("inf")
    train(x)
    assert train.skipped
    ignored = ("running_mean", "running_var", "num_batches_tracked")
    for name, one in tensors_of(ours).items():
        if not name.endswith(ignored):
            assert torch.equal(one, before[name]), name
    train(batch(shape, 1))
    assert not train.skipped
    assert not torch.equal(next(ours.model.parameters()), before[next(iter(before))])


@pytest.mark.parametrize("model", MODELS)
def test_bfloat16_steps_are_those_of_the_contiguous_model(model: str) -> None:
    make, shape = MODELS[model]
    ours, theirs = two(make, OPTIMIZERS["momentum"])
    for one in theirs.model.parameters():
        one.data = one.data.contiguous()
    trains = [one.jit(amp_dtype="bfloat16") for one in (ours, theirs)]
    for seed in range(3):
        losses = [train(batch(shape, seed)) for train in trains]
        torch.testing.assert_close(*losses, rtol=0.01, atol=1e-3)
    found, wanted = tensors_of(ours), tensors_of(theirs)
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=5e-3, check_stride=False)


def test_a_change_of_layout_between_steps_is_another_program() -> None:
    ours, theirs = two(images, OPTIMIZERS["momentum"])
    train = ours.jit()
    x = batch(MODELS["images"][1])
    train(x), theirs(x)
    for form in (torch.contiguous_format, torch.channels_last):
        for training in (ours, theirs):
            training.model.to(memory_format=form)  # type: ignore[call-overload]
        # The state stays in the layout that it has: the two differ now.
        train(x), theirs(x)
        assert_alike(ours, theirs)
    assert [one.reason for one in train.recompiles] == [
        "parameter 0.weight was of strides (27, 1, 9, 3) and is contiguous",
    ]
    assert len(train.recompiles) == 1  # back in channels_last the first program runs


def test_a_compiled_step_refuses_another_layout() -> None:
    ours, _ = two(images, OPTIMIZERS["momentum"])
    x = batch(MODELS["images"][1])
    mod, _ = amp_ir.trace_step(ours.step, (x,), **ours.parts)
    step = amp_ir.compile(mod)
    step(x)
    ours.model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    with pytest.raises(StateError) as refused:
        step(x)
    assert str(refused.value) == (
        "the step is no longer as it was captured: parameter 0.weight was of strides (27, 1, 9, 3) "
        "and is contiguous. Call amp_ir.trace_step and amp_ir.compile again, or use amp_ir.jit, "
        "which does"
    )


def test_optimizer_state_of_another_layout_is_refused_where_it_changed_in_its_place() -> None:
    ours, theirs = two(images, OPTIMIZERS["momentum"])
    x = batch(MODELS["images"][1])
    train = ours.jit()
    train(x), theirs(x)
    held = ours.optimizer.state[ours.model[0].weight]  # type: ignore[index]
    held["momentum_buffer"].data = held["momentum_buffer"].data.contiguous()
    with pytest.raises(StateError) as refused:
        train(x)
    assert str(refused.value) == (
        "optimizer_state optimizer0.0.weight.momentum_buffer was of strides (27, 1, 9, 3) at the "
        "capture and is now contiguous, changed in its place, as .data = does; assign a new tensor "
        "instead, for which amp_ir.jit compiles again, or call amp_ir.trace_step and "
        "amp_ir.compile again"
    )
    held["momentum_buffer"] = held["momentum_buffer"].clone()
    train(x), theirs(x)
    torch.testing.assert_close(ours.model.state_dict(), theirs.model.state_dict())


@pytest.mark.parametrize("model", MODELS)
def test_state_that_was_saved_goes_on(model: str, tmp_path: Path) -> None:
    make, shape = MODELS[model]
    ours, theirs = two(make, OPTIMIZERS["adam"])
    train = ours.jit()
    train(batch(shape)), theirs(batch(shape))
    file = io.BytesIO()
    torch.save([ours.model.state_dict(), ours.optimizer.state_dict()], file)
    amp_ir.save_checkpoint(tmp_path / "ck.pt", model=ours.model, optimizer=ours.optimizer)
    train(batch(shape, 1)), theirs(batch(shape, 1))
    file.seek(0)
    loaded = torch.load(file)
    again, _ = two(make, OPTIMIZERS["adam"])
    again.model.load_state_dict(loaded[0])
    again.optimizer.load_state_dict(loaded[1])
    amp_ir.load_checkpoint(tmp_path / "ck.pt", model=ours.model, optimizer=ours.optimizer)
    for one in (train, again.jit()):
        one(batch(shape, 1))
    assert_alike(ours, theirs)
    assert_alike(again, theirs)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
def test_tables_of_embeddings_may_be_transposed(optimizer: str) -> None:
    def model() -> nn.Module:
        made = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8))
        made[0].weight = nn.Parameter(permuted(made[0].weight, 1, 0))
        return made

    ours, theirs = two(model, OPTIMIZERS[optimizer])
    train = ours.jit()
    for seed in range(3):
        ids = torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(train(ids), theirs(ids))
    assert_alike(ours, theirs)
    assert ours.model[0].weight.stride() == (1, 50)  # type: ignore[index]


def test_a_table_may_be_the_weight_of_the_last_layer() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(30, 8)
            self.table.weight = nn.Parameter(permuted(self.table.weight, 1, 0))
            self.head = nn.Linear(8, 30, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: torch.Tensor) -> Any:
            return self.head(self.table(ids))

    ours, theirs = two(Tied, OPTIMIZERS["adamw"])
    train = ours.jit()
    ids = torch.arange(12).reshape(3, 4)
    for _ in range(3):
        torch.testing.assert_close(train(ids), theirs(ids))
    assert_alike(ours, theirs)


def test_two_parameters_of_one_memory_in_two_orders_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.detach().t())
    ours = Training(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ArgumentError) as refused:
        ours.jit()(torch.ones(2, 8))
    assert str(refused.value) == (
        "1.weight and 0.weight share memory but are two tensors; tie them by assigning the same "
        "Parameter to both"
    )


GAPS = "has elements that overlap or gaps between them in memory (shape (8, 6), strides {}), as "
GAPS += "expand and slices leave it; give it memory of its own before the capture: {}"


@pytest.mark.parametrize(
    ("weight", "strides"),
    [(torch.zeros(16, 6)[::2], "(12, 1)"), (torch.zeros(6, 1).expand(6, 8).t(), "(0, 1)")],
    ids=["gaps", "overlap"],
)
def test_gaps_and_overlaps_are_refused_with_what_helps(weight: torch.Tensor, strides: str) -> None:
    model = nn.Linear(6, 8)
    model.weight = nn.Parameter(weight)
    ours = Training(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train = ours.jit()
    helps = "for one in [*model.parameters(), *model.buffers()]: one.data = one.data.contiguous()"
    with pytest.raises(StateError) as refused:
        train(torch.ones(2, 6))
    assert str(refused.value) == f"parameter weight {GAPS.format(strides, helps)}"
    for one in [*model.parameters(), *model.buffers()]:
        one.data = one.data.contiguous()
    theirs = copy.deepcopy(model)
    torch.testing.assert_close(
        train(torch.ones(2, 6)), theirs(torch.ones(2, 6)).square().mean().detach()
    )


def test_buffers_that_a_step_writes_keep_their_layout() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)
            self.register_buffer("seen", torch.zeros(2, 4, 5, 5))

        def forward(self, x: torch.Tensor) -> Any:
            y = self.conv(x)
            self.seen.mul_(0.5).add_(y.detach())
            return y + self.seen

    ours, theirs = two(lambda: Mean().to(**LAST), OPTIMIZERS["sgd"])  # type: ignore[call-overload]
    train = ours.jit()
    for seed in range(3):
        train(batch((2, 3, 5, 5), seed)), theirs(batch((2, 3, 5, 5), seed))
    assert ours.model.seen.stride() == (100, 1, 20, 4)
    assert_alike(ours, theirs)


@pytest.mark.parametrize("model", MODELS)
def test_inference(model: str) -> None:
    make, shape = MODELS[model]
    ours, _ = two(make, OPTIMIZERS["sgd"])
    ours.model.eval()
    with torch.no_grad():
        expected = ours.model(batch(shape))
        found = amp_ir.jit(ours.model, model=ours.model)(batch(shape))
    torch.testing.assert_close(found, expected, check_stride=False)
    converted = amp_ir.convert_model(ours.model, (batch(shape),), "bfloat16")
    torch.testing.assert_close(
        converted(batch(shape)),
        expected,
        rtol=0.05,
        atol=0.02,
        check_stride=False,
        check_dtype=False,
    )


@pytest.mark.parametrize("model", MODELS)
def test_tools_see_the_step_as_the_user_wrote_it(model: str) -> None:
    make, shape = MODELS[model]
    ours, theirs = two(make, OPTIMIZERS["adamw"])
    found = amp_ir.verify(ours.step, (batch(shape),), amp_dtype="float32", **ours.parts)
    assert found.is_good, str(found)
    mod, _ = amp_ir.trace_step(ours.step, (batch(shape),), **ours.parts)
    shapes = {name: one.shape for name, one in ours.model.named_parameters()}
    assert {one.name: one.shape for one in mod.signature.inputs if one.name in shapes} == shapes
    overflow = batch(shape)
    overflow.view(-1)[0] = float("inf")
    step = amp_ir.compile(mod)
    origin = step.find_overflow(overflow)
    assert (origin.cause, origin.tensor) == ("batch", "batch0")
    assert_alike(ours, theirs)  # nothing of it was written


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_step_as_a_file_takes_contiguous_tensors(tmp_path: Path) -> None:
    ours, _ = two(images, OPTIMIZERS["momentum"])
    x = batch(MODELS["images"][1])
    mod, _ = amp_ir.trace_step(ours.step, (x,), **ours.parts)
    mod = mod.with_contiguous_state()
    planned = pipeline.lower(mod, host_checks="batch")
    executable = build.compile_executable(planned, cpu())
    export.export_step(executable, planned, mod, cpu(), tmp_path / "step.so")
    export.save_state(mod, tmp_path / "state.npz")
    write_batch(SimpleNamespace(batch=(x,)), mod, tmp_path)
    losses, _, _ = run_alone(tmp_path)
    torch.testing.assert_close(
        torch.tensor(losses), torch.tensor([[ours(x)] for _ in range(STEPS)])
    )
