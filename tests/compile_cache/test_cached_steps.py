# SPDX-License-Identifier: Apache-2.0
"""A step that was loaded from the compile cache is the step that was built, in all it does."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import attrs
import numpy
import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.errors import BudgetError, CopyError, IndexOutOfRangeError
from cached_steps import TinyTraining, batch, entries, is_loaded


def names(folder: Path) -> list[str]:
    return [one.name for one in entries(folder)]


@pytest.mark.parametrize("amp_dtype", [None, "bfloat16", "float16"])
def test_training_is_the_same_to_the_bit(amp_dtype, folder, monkeypatch):
    def trained():
        scaler = amp_ir.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
        return TinyTraining(amp_dtype, scaler=scaler if amp_dtype == "float16" else None).train(8)

    built, first = trained()
    loaded, second = trained()
    assert is_loaded(loaded) and not is_loaded(built) and "store" in built.report.seconds
    # With the cache off kernels are compiled in memory.
    monkeypatch.setenv("AMP_IR_CACHE", "off")
    in_memory, third = trained()
    assert not {"cache", "store"} & set(in_memory.report.seconds)
    for one, other, last in zip(first, second, third, strict=True):
        assert torch.equal(one, other) and torch.equal(one, last)
    if amp_dtype == "float16":
        assert loaded.logs[0].skips == built.logs[0].skips > 0
        assert str(loaded.logs[0].history()) == str(built.logs[0].history())  # NaN is not NaN
    assert len(names(folder)) == 1


@pytest.mark.parametrize("name", ["bert1", "lstm", "gpt2"])
def test_workloads_are_the_same_to_the_bit(name, folder, monkeypatch):
    def losses():
        torch.manual_seed(0)
        training = WORKLOADS[name].make(small=True)
        train = amp_ir.jit(
            training.step,
            model=training.model,
            optimizer=training.optimizer,
            amp_dtype="bfloat16",
        )
        found = [train(*training.batch).clone() for _ in range(3)]
        return train.compiled, [*found, *training.model.parameters()]

    built, first = losses()
    loaded, second = losses()
    monkeypatch.setenv("AMP_IR_CACHE", "off")
    in_memory, third = losses()
    assert [is_loaded(one) for one in (built, loaded, in_memory)] == [False, True, False]
    for one, other, last in zip(first, second, third, strict=True):
        assert torch.equal(one, other) and torch.equal(one, last)


def test_the_report_is_that_of_the_build(folder):
    built, loaded = (TinyTraining().compiled() for _ in range(2))
    one, other = built.report, loaded.report
    assert is_loaded(loaded) and other.seconds["cache"] > 0
    assert one.kernel_count == other.kernel_count > 0
    assert one.dispatched == other.dispatched != ()
    assert one.options == other.options
    for field in attrs.fields(type(one.plan)):
        if field.name != "intervals":
            assert getattr(one.plan, field.name) == getattr(other.plan, field.name), field.name
    pairs = list(zip(one.plan.intervals, other.plan.intervals, strict=True))
    assert pairs
    for before, after in pairs:
        assert str(attrs.evolve(before, span=None)) == str(attrs.evolve(after, span=None))
        assert str(before.span) == str(after.span)
    assert one.plan.live_bytes == other.plan.live_bytes
    assert built.program.signature == loaded.program.signature
    assert repr(loaded).startswith(repr(built).rpartition(",")[0])
    for stage in ("amp", "checks", "decompose", "dispatch", "loops", "memory"):
        assert loaded.ir(stage).split("\n", 1)[1] == built.ir(stage).split("\n", 1)[1], stage


def test_what_takes_a_step_takes_a_loaded_one(folder, tmp_path):
    TinyTraining().compiled()
    training = TinyTraining()
    loaded = training.compiled()
    assert is_loaded(loaded)
    for refused in (copy.copy, copy.deepcopy):
        with pytest.raises(CopyError):
            refused(loaded)
    mod = loaded.module
    assert "peak" in str(amp_ir.memory_report(mod, batch(0)))
    assert amp_ir.profile_kernels(mod, "cpu", batch(0), steps=1, warmup=0).to_json()
    amp_ir.save(loaded, tmp_path / "step.amp")
    again = amp_ir.load(tmp_path / "step.amp")
    assert again.report.dispatched == loaded.report.dispatched
    assert again.report.plan.values == loaded.report.plan.values
    assert torch.equal(loaded(*batch(0)), again(*batch(0)))


def test_a_checkpoint_of_a_loaded_step_continues_it(folder, tmp_path):
    losses = []
    for _ in range(2):
        training = TinyTraining()
        options = {"model": training.model, "optimizer": training.optimizer}
        train = amp_ir.jit(training.step, amp_dtype="bfloat16", **options)
        train(*batch(0))
        amp_ir.save_checkpoint(tmp_path / "run.pt", **options, step=train)
        before = [train(*batch(k)).clone() for k in (1, 2)]
        amp_ir.load_checkpoint(tmp_path / "run.pt", **options, step=train)
        after = [train(*batch(k)).clone() for k in (1, 2)]
        assert all(map(torch.equal, before, after))
        losses.append(before)
    assert is_loaded(train.compiled) and all(map(torch.equal, *losses))


def test_a_memory_budget_is_held_and_is_another_program(folder):
    free = TinyTraining(width=64).compiled(256)
    with pytest.raises(BudgetError) as raised:
        TinyTraining(width=64).compiled(256, memory_budget=1)
    # Where a CPU's kernels need such workspaces that no activation decides the peak, it is the
    # least there is, but another program all the same.
    budget = raised.value.least_bytes
    assert budget <= free.report.plan.peak_bytes
    built = TinyTraining(width=64).compiled(256, memory_budget=budget)
    loaded = TinyTraining(width=64).compiled(256, memory_budget=budget)
    assert is_loaded(loaded) and not is_loaded(built)
    assert loaded.report.plan.peak_bytes == built.report.plan.peak_bytes <= budget
    reruns = [one.is_rerun for one in built.report.plan.calls]
    assert [one.is_rerun for one in loaded.report.plan.calls] == reruns
    assert loaded.report.plan.recomputed == built.report.plan.recomputed
    assert (built.report.plan.recomputed is not None) == any(reruns)
    assert any(reruns) == (budget < free.report.plan.peak_bytes)
    assert len(names(folder)) == 2


def lookup(is_computed: bool) -> tuple[nn.Module, amp_ir.CompiledStep]:
    torch.manual_seed(0)
    model = nn.Embedding(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(ids):
        loss = model(ids + (ids.float().exp() * 0).long() if is_computed else ids).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    example = (torch.tensor([0, 4, 2]),)
    mod, _ = amp_ir.trace_step(step, example, model=model, optimizer=optimizer)
    return model, amp_ir.compile(mod)


@pytest.mark.parametrize("is_computed", [False, True])
def test_indices_are_checked(is_computed, folder):
    messages = []
    for _ in range(2):
        model, train = lookup(is_computed)
        before = model.weight.detach().clone()
        with pytest.raises(IndexOutOfRangeError) as refused:
            train(torch.tensor([0, 5, 2]))
        messages.append(str(refused.value))
        assert torch.equal(model.weight, before)
        assert train(torch.tensor([0, 1, 2])) > 0 and not torch.equal(model.weight, before)
    assert is_loaded(train) and messages[0] == messages[1]
    assert ("rolled back" in messages[1]) == is_computed


def test_a_converted_model_is_loaded(folder):
    def converted():
        torch.manual_seed(1)
        return amp_ir.convert_model(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), x, "bfloat16")

    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    one, other = converted(), converted()
    assert not is_loaded(one.compiled) and is_loaded(other.compiled)
    assert torch.equal(one(x), other(x))


def test_a_jitted_step_is_loaded_for_every_shape(folder):
    for is_second in (False, True):
        training = TinyTraining()
        train = amp_ir.jit(
            training.step,
            model=training.model,
            optimizer=training.optimizer,
            amp_dtype="bfloat16",
        )
        for rows in (4, 3):
            train(*batch(0, rows))
            assert is_loaded(train.compiled) is is_second
    assert train.recompiles


def test_ops_of_pytorch_are_called_from_a_loaded_step(folder):
    def step(x):
        return torch.lgamma(torch.nn.functional.gelu(x) + 2)

    x, model = torch.linspace(0.1, 3, 6), nn.Linear(1, 1)
    made = []
    for _ in range(2):
        mod, _ = amp_ir.trace_step(step, (x,), model=model)
        made.append(amp_ir.compile(mod, device=torch.device("cpu"), opt_level=numpy.int64(3)))
    assert [is_loaded(one) for one in made] == [False, True]
    assert torch.equal(made[0](x), made[1](x))


def test_whoever_asks_for_the_stages_gets_a_compilation(folder, tmp_path, monkeypatch):
    TinyTraining().compiled()
    monkeypatch.setenv("AMP_IR_DUMP", str(tmp_path / "stages"))
    assert not is_loaded(TinyTraining().compiled())
    assert list((tmp_path / "stages").rglob("*-memory.txt"))


def test_without_a_linker_steps_are_compiled_in_memory(folder, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "amp_ir")
    kept = TinyTraining().compiled()
    monkeypatch.setattr("amp_ir.api.cached_build.missing_linker", lambda: "there is no g++")
    # What was linked before is loaded.
    assert is_loaded(TinyTraining().compiled())
    for _ in range(2):
        other = TinyTraining(factor=0.25).compiled()
        assert not is_loaded(other) and "store" not in other.report.seconds
    told = [one.getMessage() for one in caplog.records]
    assert told == ["compiled steps are not kept for a later start: there is no g++"]
    assert kept(*batch(0)) is not None and len(names(folder)) == 1


def test_a_linker_that_fails_costs_the_entry_only(folder, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "amp_ir")
    monkeypatch.setattr("amp_ir.vm.build_library._OPTIONS", ["-no-such-option"])
    train = TinyTraining(factor=0.125).compiled()
    assert torch.isfinite(train(*batch(0))) and not names(folder)
    (told,) = [one.getMessage() for one in caplog.records]
    assert told.startswith(
        "compiled steps are not kept for a later start: the step cannot be linked to a shared "
        "library; g++ or clang++ must work, and the folder for temporary files must be writable. "
        "The linker says: "
    )
