# SPDX-License-Identifier: Apache-2.0
"""Without a budget, what costs next to no time is run again: less memory, the same bits."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.api import lower
from amp_ir.errors import OptionError
from amp_ir.ir import target as targets
from amp_ir.ir.memory_plan import MemoryPlan
from amp_ir.memory import rerun_cheaply
from planned_steps import check_plan, results_of, traced


def layers(rows: int, count: int = 4, width: int = 256) -> tuple[Any, Any]:
    """Layers of a GELU, each of which keeps what is 4 times as wide as its input, twice.

    In float32, whose plan is the same on every CPU.
    """
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for _ in range(count)
    ]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batch = (torch.randn(rows, width),)
    return amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)


def reruns(plan: MemoryPlan) -> int:
    return sum(call.is_rerun for call in plan.calls)


def test_a_large_step_holds_less_and_computes_the_same_bits() -> None:
    mod, args = layers(rows=4096)
    free, planned = lower(mod, recompute=False), lower(mod)
    check_plan(planned.plan)
    assert not reruns(free.plan)
    assert reruns(planned.plan)
    assert planned.plan.peak_bytes < 0.95 * free.plan.peak_bytes
    report = amp_ir.memory_report(mod, args)
    assert report.reruns == reruns(planned.plan) > 1
    assert amp_ir.memory_report(mod, args, recompute=False).reruns == 0
    pairs = zip(results_of(mod, planned, args), results_of(mod, free, args), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_report_says_which_calls_run_again_and_what_that_saves_and_costs() -> None:
    mod, args = layers(rows=4096)
    free, report = (amp_ir.memory_report(mod, args, recompute=one) for one in (False, True))
    again = report.recomputed
    assert again is not None and free.recomputed is None and free.rerun_line() == ""
    assert again.saved_nbytes == free.lower_bound_bytes - report.lower_bound_bytes > 0
    # Some more than 2 % of the time, for three times that share of the peak.
    saved_share = again.saved_nbytes / free.lower_bound_bytes
    assert 0 < 3 * again.time_share < saved_share and again.time_share < 0.05
    line = report.rerun_line()
    saved = f"{again.saved_nbytes / 2**20:.1f} MiB less at the peak"
    cost = f"{again.time_share:.1%} more of the estimated time"
    assert line.startswith(f"{report.reruns} calls run a second time: {saved} for {cost}; ")
    assert " x gelu" in line
    assert line in " ".join(str(report).split()) and "calls run a second time" not in str(free)
    marked = [one["is_rerun"] for one in json.loads(report.to_json())["timeline"]]
    assert sum(marked) == report.reruns


def test_what_a_budget_saves_is_told_in_the_same_words() -> None:
    mod, args, _ = traced(None)
    plan = lower(mod, recompute=False).plan
    budget = plan.state_bytes + int(0.9 * (plan.peak_bytes - plan.state_bytes))
    report = amp_ir.memory_report(mod, args, memory_budget=budget)
    assert report.reruns and report.recomputed is not None
    assert report.recomputed.saved_nbytes > 0 and report.recomputed.time_share > 0
    assert f"{report.reruns} call" in report.rerun_line()


@pytest.mark.parametrize("recompute", [0, "no", None])
def test_a_value_that_recompute_does_not_have_is_refused(recompute: Any) -> None:
    mod, _ = layers(rows=64)
    message = f"recompute={recompute!r} is not known; expected True, or False for a step"
    with pytest.raises(OptionError, match=re.escape(message)):
        amp_ir.compile(mod, recompute=recompute)
    with pytest.raises(OptionError, match=re.escape(message)):
        amp_ir.jit(lambda x: x, model=nn.Linear(2, 2), recompute=recompute)


def test_a_budget_without_second_runs_is_refused() -> None:
    mod, _ = layers(rows=64)
    message = r"recompute=False with memory_budget=1000000: a budget is held by running calls"
    with pytest.raises(OptionError, match=message):
        lower(mod, recompute=False, memory_budget=1_000_000)


def test_a_compiled_step_and_a_jitted_one_take_the_option() -> None:
    mod, _ = layers(rows=4096)
    train, other = (amp_ir.compile(mod, recompute=one) for one in (False, True))
    assert not reruns(train.report.plan) and reruns(other.report.plan)
    # Its text is of the same program, which it makes again.
    assert len(train.ir("memory").splitlines()) < len(other.ir("memory").splitlines())
    model = nn.Linear(2, 2)
    jitted = amp_ir.jit(lambda x: model(x).sum().detach(), model=model, recompute=False)
    jitted(torch.ones(1, 2))
    assert jitted.report.options["recompute"] is False


def test_a_small_step_stays_as_it_is() -> None:
    mod, _ = layers(rows=64)
    assert not reruns(lower(mod).plan)


@pytest.mark.parametrize("amp_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("most_time", [0.01, 0.3])
def test_no_size_or_share_of_time_changes_a_bit(
    amp_dtype: str | None, most_time: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout draws, moments and parameters after three steps."""
    mod, args, _ = traced(amp_dtype)
    free = lower(mod)
    monkeypatch.setattr(rerun_cheaply, "_LEAST_BYTES", 0)
    monkeypatch.setattr(rerun_cheaply, "_LEAST_GAIN", 0.0)
    monkeypatch.setattr(rerun_cheaply, "_MOST_TIME", most_time)
    planned = lower(mod)
    check_plan(planned.plan)
    assert reruns(planned.plan)
    pairs = zip(results_of(mod, planned, args), results_of(mod, free, args), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_nothing_is_run_again_for_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each share of time must save three times that share of the peak."""
    mod, _ = layers(rows=4096)
    monkeypatch.setattr(rerun_cheaply, "_LEAST_GAIN", 1e3)
    assert not reruns(lower(mod).plan)


@pytest.mark.parametrize("disable_fusion", [False, True])
def test_a_step_for_a_gpu_stays_as_it_is(disable_fusion: bool) -> None:
    mod, _ = layers(rows=4096)
    planned = lower(mod, target=targets.cuda("sm_90"), disable_fusion=disable_fusion)
    assert not reruns(planned.plan)
