# SPDX-License-Identifier: Apache-2.0
"""The order of calls and running calls again: less memory, the same bits, a budget that is held."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import amp_ir
from amp_ir.api import lower
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.errors import BudgetError, OptionError
from amp_ir.loops.cpu.emit_cpu import emit_copy
from amp_ir.memory import plan_memory as planning
from amp_ir.memory.buffers import bufferize
from amp_ir.memory.liveness import Liveness
from amp_ir.memory.order_calls import order_calls
from amp_ir.memory.plan_memory import plan_memory
from amp_ir.memory.rematerialize import Rematerialization
from amp_ir.runtime.program import Program
from amp_ir.vm.build import build
from planned_steps import (
    DRAWS,
    UPDATES,
    check_plan,
    fused,
    results_of,
    signature_of,
    traced,
    well_ordered,
)
from random_steps import random_inputs, random_step


@pytest.mark.parametrize("amp_dtype", [None, "bfloat16"])
def test_a_budget_is_held_and_changes_no_bit(amp_dtype: str | None) -> None:
    """Dropout draws, moments and parameters after three steps, whatever is computed twice."""
    mod, args, _ = traced(amp_dtype)
    free = lower(mod)
    expected = results_of(mod, free, args)
    rest = free.plan.peak_bytes - free.plan.state_bytes
    for share in (0.9, 0.75, 0.6):
        budget = free.plan.state_bytes + int(share * rest)
        planned = lower(mod, memory_budget=budget)
        assert planned.plan.peak_bytes <= budget
        assert any(call.is_rerun for call in planned.plan.calls)
        check_plan(planned.plan)
        found = results_of(mod, planned, args)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_budget_that_is_no_constraint_changes_nothing() -> None:
    mod, _, _ = traced(None)
    free = lower(mod).plan
    assert lower(mod, memory_budget=free.peak_bytes).plan == free
    assert not any(call.is_rerun for call in free.calls)


def test_cheap_calls_are_run_again_before_matmuls() -> None:
    mod, _, _ = traced("bfloat16", width=512)
    free = lower(mod).plan
    rest = free.peak_bytes - free.state_bytes
    calls = lower(mod, memory_budget=free.state_bytes + int(0.9 * rest)).plan.calls
    again = [call for call in calls if call.is_rerun]
    assert again and not any("matmul" in call.name for call in again)
    assert any(call.is_cast for call in again)


def test_a_matmul_without_a_bias_may_run_again() -> None:
    """The two calls of one matmul must not share the null that stands for its bias."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))

    def step(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        loss = model(x).square().mean()
        loss.backward()
        assert x.grad is not None
        return x.grad

    mod, args = amp_ir.trace_step(step, (torch.randn(4096, 64),), model=model)
    free = lower(mod)
    # The least that is found: a library's workspace decides what share of the peak that is.
    with pytest.raises(BudgetError) as caught:
        lower(mod, memory_budget=1)
    planned = lower(mod, memory_budget=caught.value.least_bytes)
    assert any(call.is_rerun and "matmul" in call.name for call in planned.plan.calls)
    found, expected = results_of(mod, planned, args), results_of(mod, free, args)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_compiled_step_runs_within_its_budget() -> None:
    mod, args, model = traced("bfloat16")
    peer = copy.deepcopy(model)
    free = lower(mod).plan
    budget = free.state_bytes + int(0.7 * (free.peak_bytes - free.state_bytes))
    train = amp_ir.compile(mod, memory_budget=budget)
    assert train.report.plan.peak_bytes <= budget
    assert amp_ir.get_peak_memory(mod, "cpu", args, memory_budget=budget) <= budget / 2**20
    assert amp_ir.memory_report(mod, memory_budget=budget).peak_bytes <= budget
    assert train(*args).isfinite()
    changed = zip(model.parameters(), peer.parameters(), strict=True)
    assert not any(torch.equal(ours, theirs) for ours, theirs in changed)


def test_a_budget_that_cannot_be_held_says_what_can() -> None:
    mod, args, _ = traced(None)
    with pytest.raises(BudgetError) as caught:
        amp_ir.compile(mod, memory_budget=1000)
    text = str(caught.value)
    least = int(text.rpartition("memory_budget=")[2].split()[0])
    plan = lower(mod, memory_budget=least).plan
    assert plan.peak_bytes <= least
    # What is kept of the state to undo a failed step is state, too.
    outside = plan.state_bytes + plan.writes.kept_nbytes + plan.batch_bytes + plan.result_bytes
    # Activations of 65536 bytes, and what a matmul of theirs has for itself.
    value = r"\S+ \(6\d{4} bytes, [^)]* \((?:forward|backward)\), [^)]*\)"
    assert re.fullmatch(
        f"memory_budget=1000 bytes cannot be held: state, batch and results take {outside} bytes, "
        rf"and the least that was found for the rest is {least - outside}, at call \d+ "
        rf"\([a-z_, ]+\), which needs {value}, {value}, {value}. Pass memory_budget={least} or "
        "more, or make the batch smaller",
        text,
    ), text
    # What was found is not a proof that less cannot be held, but nothing at all cannot.
    with pytest.raises(BudgetError):
        lower(mod, memory_budget=outside)
    train = amp_ir.jit(lambda x: x.sum(), model=nn.Linear(2, 2), memory_budget=1)
    with pytest.raises(BudgetError):
        train(torch.ones(2))


@pytest.mark.parametrize("budget", [0, -1, True, 2.5, "1GiB"])
def test_a_budget_is_a_number_of_bytes(budget: Any) -> None:
    expected = (
        f"memory_budget={budget!r} is not a number of bytes; expected a positive int, such as "
        "2 * 2**30 for 2 GiB, or None"
    )
    mod, _, _ = traced(None)
    with pytest.raises(OptionError) as caught:
        amp_ir.compile(mod, memory_budget=budget)
    assert str(caught.value) == expected
    with pytest.raises(OptionError) as caught:
        amp_ir.jit(lambda x: x, model=nn.Linear(2, 2), memory_budget=budget)
    assert str(caught.value) == expected


@settings(max_examples=20, deadline=None)
@given(DRAWS, UPDATES, st.floats(0.3, 0.95))
def test_whatever_the_order_and_the_budget_the_bits_are_the_same(
    draws: list[int], updated: dict[int, int], share: float
) -> None:
    ir = fused(draws)
    signature = signature_of(random_step(draws), updated)
    plans = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "order_calls", lambda live: None)
        plans.append(plan_memory(ir, signature.inputs, signature.outputs, copy_kernel=emit_copy))
    plans.append(plan_memory(ir, signature.inputs, signature.outputs, copy_kernel=emit_copy))
    budget = int(share * plans[1].plan.arena_bytes) + (
        plans[1].plan.peak_bytes - plans[1].plan.arena_bytes
    )
    try:
        plans.append(
            plan_memory(
                ir,
                signature.inputs,
                signature.outputs,
                copy_kernel=emit_copy,
                memory_budget=max(budget, 1),
            )
        )
        assert plans[2].plan.peak_bytes <= budget
    except BudgetError:
        pass
    outcomes = []
    for planned in plans:
        check_plan(planned.plan)
        state = {f"i{k}": tensor.clone() for k, tensor in enumerate(random_inputs())}
        program = Program(build(planned), planned.plan, signature, state)
        outputs = [out for _ in range(2) for out in program.run([])]
        outcomes.append([*outputs, *state.values()])
    for outcome in outcomes[1:]:
        for found, expected in zip(outcome, outcomes[0], strict=True):
            assert found.numpy().tobytes() == expected.numpy().tobytes()


@settings(max_examples=40, deadline=None)
@given(DRAWS, UPDATES, st.integers(0, 4000))
def test_no_pass_breaks_the_order_or_raises_the_peak(
    draws: list[int], updated: dict[int, int], target: int
) -> None:
    signature = signature_of(random_step(draws), updated)
    program = bufferize(fused(draws), signature.inputs)
    live = Liveness(program, signature.outputs)
    before = live.most
    order_calls(live)
    ordered = Liveness(program, signature.outputs).most
    assert ordered <= before and well_ordered(program)
    calls = len(program.calls)
    is_held = Rematerialization(live).reach(target)
    after = Liveness(program, signature.outputs).most
    assert well_ordered(program)
    assert is_held == (after <= target)
    assert after <= ordered or len(program.calls) == calls


@settings(max_examples=40, deadline=None)
@given(DRAWS, UPDATES, st.integers(0, 4000))
def test_nothing_reads_a_state_input_after_it_has_been_written(
    draws: list[int], updated: dict[int, int], target: int
) -> None:
    signature = signature_of(random_step(draws), updated)
    program = bufferize(fused(draws), signature.inputs)
    live = Liveness(program, signature.outputs)
    order_calls(live)
    Rematerialization(live).reach(target)
    planning._Planner(live, signature.inputs).run()
    for given_buffer in program.inputs:
        reads = [k for k, call in enumerate(program.calls) if given_buffer in call.reads]
        for position, call in enumerate(program.calls):
            for output, buffer in enumerate(call.results):
                if buffer.parameter is not given_buffer.parameter:
                    continue
                assert all(read <= position for read in reads)
                # Reading and writing it at once is for kernels that say so.
                allowed = {source for result, source in call.inplace_pairs() if result == output}
                at = {k for k, one in enumerate(call.arguments) if one is given_buffer}
                assert at <= allowed


@pytest.mark.parametrize("name", ["bert1", "mlp", "gpt2", "resnet50", "lstm"])
def test_the_bytes_counted_before_placing_are_those_of_the_plan(name: str) -> None:
    training = WORKLOADS[name].make(small=True)
    mod, _ = amp_ir.trace_step(
        training.step, training.batch, model=training.model, optimizer=training.optimizer
    )
    with pytest.MonkeyPatch.context() as patch:
        seen: list[int] = []

        def counted(live: Liveness) -> None:
            order_calls(live)
            seen.append(live.most)

        patch.setattr(planning, "order_calls", counted)
        plan = lower(mod).plan
    assert seen == [plan.lower_bound_bytes]
    assert plan.peak_bytes <= 1.05 * (plan.peak_bytes - plan.arena_bytes + plan.lower_bound_bytes)


def test_what_an_earlier_plan_put_outside_of_the_arena_counts_again() -> None:
    """Else the least that is named for one budget is not held by another: 225996 bytes were not."""
    torch.manual_seed(1)
    table = nn.Embedding(50, 32)
    layers = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)]
    model = nn.ModuleList([table, nn.Sequential(*layers)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(ids: torch.Tensor) -> torch.Tensor:
        hidden = table(ids)
        out = model[1](hidden) + F.gelu(hidden @ table.weight.t()) @ table.weight
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batch = (torch.randint(0, 50, (40,)),)
    mod, _ = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
    with pytest.raises(BudgetError) as caught:
        lower(mod, memory_budget=1)
    least = caught.value.least_bytes
    assert lower(mod, memory_budget=least).plan.peak_bytes <= least


def test_values_smaller_than_their_alignment_end_the_search() -> None:
    """Gaps of up to 63 bytes stay between values of a few bytes, however little is held at once."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1, 1))
            self.slope = nn.PReLU()
            self.least = nn.Parameter(torch.zeros(1, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.scale
            pooled = torch.maximum(F.adaptive_avg_pool1d(x, 2), self.least)
            return self.slope(x.expand(3, 4, 1)).square().mean() + pooled.square().mean()

    def build() -> tuple[Callable[..., torch.Tensor], dict[str, Any]]:
        model = Model().bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss = model(x)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, {"model": model, "optimizer": optimizer}

    x = torch.ones(4, 1, dtype=torch.bfloat16)
    step, objects = build()
    train = amp_ir.jit(step, **objects)
    loss = train(x)
    needed = train.compiled.report.plan.peak_bytes
    for share in (0.5, 0.75, 0.95):
        step, objects = build()
        with pytest.raises(BudgetError, match=r"Pass memory_budget=(\d+) or more") as refused:
            amp_ir.jit(step, **objects, memory_budget=int(share * needed))(x)
        enough = int(re.search(r"Pass memory_budget=(\d+)", str(refused.value))[1])
        step, objects = build()
        assert torch.equal(amp_ir.jit(step, **objects, memory_budget=enough)(x), loss)
