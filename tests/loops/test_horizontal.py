# SPDX-License-Identifier: Apache-2.0
"""Kernels merged behind the last library call: few of them, and the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import tvm
import tvm_ffi
from torch import nn

import amp_ir
from amp_ir import pipeline
from amp_ir.loops import write_kernels
from amp_ir.loops.fusion import cpu_tasks as merge_tasks
from amp_ir.loops.fusion import horizontal
from amp_ir.loops.fusion.horizontal import fuse_horizontally
from amp_ir.loops.fusion.horizontal_groups import Merger


def training(optimizer: str, *, is_scaled: bool) -> tuple[Any, ...]:
    """A network of many small parameters, a few large ones, and two that are alike."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width in (24, 24, 300):
        layers += [nn.Linear(24, width), nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, 24)]
    model = nn.Sequential(*layers)
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
    scaler = amp_ir.GradScaler("cpu", init_scale=64.0, enabled=is_scaled)

    def step(x: torch.Tensor) -> torch.Tensor:
        made.zero_grad()
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(made)
        scaler.update()
        return loss.detach()

    return model, made, scaler, step


def calls_of(ir: tvm.IRModule) -> list[str]:
    """The kernel or library function of each call of `main`, in order."""
    bindings = [one for block in ir["main"].body.blocks for one in block.bindings]
    values = [one.value for one in bindings if isinstance(one.value, tvm.ir.Call)]
    return [str(one.args[0]) for one in values if one.op.name != "relax.reshape"]


def weights_after(optimizer: str, *, is_scaled: bool, steps: int = 4) -> list[torch.Tensor]:
    model, made, scaler, step = training(optimizer, is_scaled=is_scaled)
    train = amp_ir.jit(step, model=model, optimizer=made, scaler=scaler)
    torch.manual_seed(1)
    for number in range(steps):
        x = torch.randn(8, 24)
        x[0, 0] = float("inf") if is_scaled and number == 2 else x[0, 0]
        train(x)
    states = [value for state in made.state.values() for value in state.values()]
    return [one.detach().clone() for one in (*model.parameters(), *states)]


CASES = [("SGD", False, 64), ("AdamW", True, 64), ("AdamW", True, merge_tasks.TASK_ELEMENTS)]


@pytest.mark.parametrize(("optimizer", "is_scaled", "task_elements"), CASES)
def test_merged_kernels_give_the_same_bits(
    optimizer: str, is_scaled: bool, task_elements: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(merge_tasks, "TASK_ELEMENTS", task_elements)
    monkeypatch.setattr(horizontal, "SMALL_ELEMENTS", task_elements)
    merged = weights_after(optimizer, is_scaled=is_scaled)
    monkeypatch.setattr(write_kernels, "fuse_horizontally", lambda ir, _merger: ir)
    apart = weights_after(optimizer, is_scaled=is_scaled)
    assert all(map(torch.equal, merged, apart))


def lowered(
    monkeypatch: pytest.MonkeyPatch, *, is_scaled: bool = False, made: tuple[Any, ...] | None = None
) -> tuple[Any, Any]:
    """The IR of a step, by default that of `training`, before and after merging."""
    seen = []

    def merge(ir: tvm.IRModule, merger: Merger) -> tvm.IRModule:
        seen.extend([ir, fuse_horizontally(ir, merger)])
        return seen[1]

    monkeypatch.setattr(write_kernels, "fuse_horizontally", merge)
    model, optimizer, scaler, step = made or training("AdamW", is_scaled=is_scaled)
    mod, _ = amp_ir.trace_step(
        step, (torch.randn(8, 24),), model=model, optimizer=optimizer, scaler=scaler
    )
    pipeline.lower(mod)
    return tuple(seen)


def test_the_updates_of_all_parameters_are_a_handful_of_kernels(monkeypatch: pytest.MonkeyPatch):
    before, after = lowered(monkeypatch, is_scaled=True)
    parameters = 18
    behind = [calls_of(ir) for ir in (before, after)]
    last = [max(k for k, one in enumerate(calls) if "kernel" not in one) for calls in behind]
    assert len(behind[0]) - last[0] > parameters
    # Scalars and checks, what was found, two batches of updates, the log.
    assert len(behind[1]) - last[1] <= 14
    assert sum(map(len, behind[:1])) > sum(map(len, behind[1:]))


def test_no_merged_kernel_has_too_many_parameters(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(merge_tasks, "MOST_PARAMETERS", 40)
    before, after = lowered(monkeypatch, is_scaled=True)
    known = {variable.name_hint for variable in before.functions}
    made = [f for variable, f in after.functions.items() if variable.name_hint not in known]
    assert len(made) > 3
    assert all(len(function.params) <= 40 for function in made)


def distinct_merged(monkeypatch: pytest.MonkeyPatch, layers: int) -> tuple[int, int]:
    """The number of merged kernels of a deep network, and of the functions among them."""
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24)) for _ in range(layers))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    before, after = lowered(monkeypatch, made=(model, optimizer, None, step))
    known = {variable.name_hint for variable in before.functions}
    merged = [f for variable, f in after.functions.items() if variable.name_hint not in known]
    hashes = {tvm_ffi.structural_hash(one.without_attr("global_symbol")) for one in merged}
    return len(merged), len(hashes)


def test_a_deeper_model_has_more_launches_of_the_same_functions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(merge_tasks, "MOST_PARAMETERS", 40)
    launches, functions = distinct_merged(monkeypatch, 9)
    more_launches, more_functions = distinct_merged(monkeypatch, 17)
    # Weights, vectors, and two mixtures of what is left.
    assert (functions, more_functions) == (4, 4)
    assert 4 < launches < more_launches


def test_a_large_kernel_stays_where_its_gradient_is_used_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(merge_tasks, "TASK_ELEMENTS", 600)
    monkeypatch.setattr(horizontal, "SMALL_ELEMENTS", 600)
    before, after = lowered(monkeypatch, is_scaled=False)
    position = {name: k for k, name in enumerate(calls_of(after)) if "kernel" in name}
    library = [k for k, name in enumerate(calls_of(after)) if "kernel" not in name]
    large = [
        variable.name_hint
        for variable, function in before.functions.items()
        if variable.name_hint != "main"
        and any(int(one.shape[0]) == 7200 for one in function.params)
    ]
    assert large
    assert min(position[f'I.GlobalVar("{name}")'] for name in large) < library[-1]
