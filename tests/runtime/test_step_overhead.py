# SPDX-License-Identifier: Apache-2.0
"""What a step does besides its kernels: nothing that grows with the number of parameters but looks.

Times are measured by `python -m benchmarks` (column "host"); here is what keeps them low.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir import errors
from amp_ir.api import lower
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.host import native
from amp_ir.ir.index_check import IndexCheck
from amp_ir.ir.location import Location
from amp_ir.runtime import program as programs
from amp_ir.runtime import program_input
from square_steps import square_step


def compiled(layers: int) -> tuple[amp_ir.CompiledStep, torch.Tensor]:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())

    step = square_step(model, optimizer)

    batch = (torch.randn(4, 8),)
    mod, _ = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
    return amp_ir.compile(mod), batch[0]


def test_a_step_converts_the_batch_and_its_results_but_no_state_and_no_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    converted: list[torch.Size] = []
    real = programs.flat_view

    def counted(tensor: torch.Tensor) -> Any:
        converted.append(tensor.shape)
        return real(tensor)

    monkeypatch.setattr(programs, "flat_view", counted)
    monkeypatch.setattr(program_input, "flat_view", counted)
    counts = []
    for layers in (1, 6):
        train, x = compiled(layers)
        train(x)
        converted.clear()
        train(x)
        counts.append(Counter(converted))
    assert counts[0] == counts[1]
    # The batch and the loss; learning rate, betas and so on have memory of their own.
    assert sorted(counts[0].elements()) == [torch.Size([]), x.shape]


@pytest.mark.parametrize("name", ["bert1", "lstm"])
def test_no_two_views_of_a_step_are_of_the_same_bytes(name: str) -> None:
    training = WORKLOADS[name].make(small=True)
    mod, _ = amp_ir.trace_step(
        training.step, training.batch, model=training.model, optimizer=training.optimizer
    )
    planned = lower(mod)
    bindings = planned.ir["main"].body.blocks[0].bindings
    views = [
        tuple(map(str, one.value.args))
        for one in bindings
        if str(getattr(one.value.op, "global_symbol", "")) == "amp_ir.view"
    ]
    assert views and len(set(views)) == len(views)
    # All that is called: kernels, library calls and these.
    assert len(bindings) == len(views) + len(planned.plan.calls)


def count_checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list to which each check of a tensor of the state in Python adds its name."""
    checked: list[str] = []
    real = program_input.ProgramInput._check

    def counted(self: program_input.ProgramInput, tensor: torch.Tensor) -> None:
        checked.append(self.spec.name)
        real(self, tensor)

    monkeypatch.setattr(program_input.ProgramInput, "_check", counted)
    return checked


def test_state_is_checked_in_python_only_after_it_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = count_checks(monkeypatch)
    train, x = compiled(3)
    train(x)
    train(x)
    checked.clear()
    train(x)
    assert checked == []
    weight = next(t for t in train.module.state.values() if isinstance(t, nn.Parameter))
    weight.data = weight.data.clone()
    train(x)
    assert checked
    checked.clear()
    train(x)
    assert checked == []


def test_memory_of_state_that_was_replaced_is_the_memory_that_is_updated() -> None:
    train, x = compiled(1)
    train(x)
    for parameter in [t for t in train.module.state.values() if isinstance(t, nn.Parameter)]:
        old = parameter.data
        before = old.clone()
        parameter.data = old.clone()
        train(x)
        assert torch.equal(old, before)
        assert not torch.equal(parameter.data, before)


@pytest.mark.parametrize("nbytes", [0, 64])
def test_state_without_its_memory_is_refused_after_calls_that_passed(nbytes: int) -> None:
    train, x = compiled(1)
    train(x)
    train(x)
    weight = next(t for t in train.module.state.values() if isinstance(t, nn.Parameter))
    assert weight.nbytes > nbytes
    whole = weight.untyped_storage().nbytes()
    weight.untyped_storage().resize_(nbytes)
    with pytest.raises(errors.StateError, match="its storage was freed or resized"):
        train(x)
    weight.untyped_storage().resize_(whole)
    train(x)


def test_a_number_is_what_it_is_now_at_each_call() -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def step(x: torch.Tensor) -> None:
        (weight * x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    x = torch.ones(3)
    model = nn.ParameterList([weight])
    mod, _ = amp_ir.trace_step(step, (x,), model=model, optimizer=optimizer)
    train = amp_ir.compile(mod)
    # -0.0 * 1 is -0.0, and 0.0 - -0.0 is 0.0, where -0.0 - 0.0 is -0.0.
    rates = [0.5, 0.5, 0.0, -0.0, 0.25, torch.tensor(2.0), torch.tensor(2.0), 3, float("nan")]
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        with torch.no_grad():
            weight.fill_(-0.0)
        train(x)
        expected = torch.full((3,), -0.0) - float(rate) * x
        assert torch.equal(weight.data.nan_to_num(9.0), expected.nan_to_num(9.0)), rate
        assert torch.equal(weight.signbit(), expected.signbit()) or rate != rate


def refused(x: torch.Tensor) -> dict[str, tuple[Any, ...]]:
    return {
        "dtype": (x.double(),),
        "shape": (torch.randn(5, 8),),
        "not a leaf": (torch.randn(4, 8, requires_grad=True) * 2,),
        "negated": (torch._neg_view(x),),
        "two": (x, x),
        "none": (),
        "nested": ((x,),),
        "a number": (3.0,),
    }


@pytest.mark.parametrize("kind", refused(torch.randn(4, 8)))
def test_a_batch_unlike_those_that_passed_is_refused(kind: str) -> None:
    train, x = compiled(1)
    train(x)
    train(x)
    with pytest.raises(errors.ArgumentError):
        train(*refused(x)[kind])
    assert torch.isfinite(train(torch.randn(8, 4).t()))  # other strides
    assert torch.isfinite(train(x))


def test_a_jitted_step_refuses_what_is_no_leaf_after_a_leaf_that_passed() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    step = square_step(model, optimizer)

    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    x = torch.randn(4, 8)
    train(x)
    train(x)
    assert torch.isfinite(train(torch.randn(6, 8)))
    for wrong in (torch._neg_view(x), torch.randn(4, 8, requires_grad=True) * 2):
        with pytest.raises(errors.ArgumentError):
            train(wrong)
    assert torch.isfinite(train(x))
    assert len(train.recompiles) == 1


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("count", [1, 7, 32768, 32769])
def test_extremes_of_indices(dtype: torch.dtype, count: int) -> None:
    check = IndexCheck("op", Location(), 0, 10)
    numbers = torch.randint(-1000, 1000, (2 * count,), dtype=dtype)
    numbers[0], numbers[-1] = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    for given in (numbers, numbers[::2], numbers[1:], numbers.view(2, count).t()):
        assert check.extremes_of(given) == (int(given.min()), int(given.max()))


def test_extremes_refuse_what_they_cannot_read() -> None:
    extremes = native.function("amp_ir.step.extremes")
    for wrong in ((0, 1, 64), (64, 0, 64), (64, 1, 16)):
        with pytest.raises(ValueError, match="expected at least 1, of 32 or 64"):
            extremes(*wrong)
