# SPDX-License-Identifier: Apache-2.0
"""Without a budget, what costs next to no time is run again: less memory, the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.api import lower
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


def without(monkeypatch: pytest.MonkeyPatch, mod: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(rerun_cheaply, "_MOST_TIME", -1.0)
        return lower(mod)


def test_a_large_step_holds_less_and_computes_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mod, args = layers(rows=4096)
    free, planned = without(monkeypatch, mod), lower(mod)
    check_plan(planned.plan)
    assert not reruns(free.plan)
    assert reruns(planned.plan)
    assert planned.plan.peak_bytes < 0.95 * free.plan.peak_bytes
    report = amp_ir.memory_report(mod, args)
    assert report.reruns == reruns(planned.plan) > 1
    told = f"{report.reruns} calls run a second time, so that less is held in between"
    assert told in str(report).splitlines()
    pairs = zip(results_of(mod, planned, args), results_of(mod, free, args), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


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
