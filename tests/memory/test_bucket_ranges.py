# SPDX-License-Identifier: Apache-2.0
"""Buckets in the plan: neighbours in the arena, begun early, waited for late, before any state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amp_ir import pipeline
from amp_ir.dialect.collectives import START_SYMBOL, WAIT_SYMBOL
from amp_ir.ir.bucket_sizes import BucketSizes
from amp_ir.ir.collective_call import read_collective
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.memory_plan import MemoryPlan, PlannedStep
from amp_ir.ir.step_module import StepModule
from amp_ir.ir.tensor_layout import ALIGNMENT_BYTES
from amp_ir.rewrites.start_collectives import start_collectives
from captured_ranks import captured


def network(*, norm: bool) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(32, 32), nn.BatchNorm1d(32) if norm else nn.ReLU()]
    return nn.Sequential(*layers)


def planned(
    *, norm: bool = False, keeps: bool = False, **options: Any
) -> tuple[StepModule, PlannedStep]:
    model = network(norm=norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        if not keeps:
            optimizer.zero_grad()
        return loss.detach()

    mod = captured(step, (torch.randn(8, 32),), [model], [optimizer], **options)
    mod = mod.with_ir(start_collectives(mod.ir))
    return mod, pipeline.lower(mod)


def places(plan: MemoryPlan, symbol: str) -> list[int]:
    return [k for k, call in enumerate(plan.calls) if call.symbol == symbol]


def test_the_tensors_of_a_bucket_are_neighbours() -> None:
    _, step = planned(sizes=BucketSizes(4200, 4200))
    plan = step.plan
    starts = [k for k in places(plan, START_SYMBOL)]
    assert len(starts) == 4
    for place in starts:
        sent = [
            one
            for one in plan.values
            if one.first_use == place
            and one.op == "all_reduce_start"
            and one.offset_bytes is not None
        ]
        sent.sort(key=lambda one: one.offset_bytes or 0)
        assert len(sent) == 2
        for one, after in zip(sent, sent[1:], strict=False):
            gap = (after.offset_bytes or 0) - (one.offset_bytes or 0) - one.nbytes
            assert 0 <= gap < ALIGNMENT_BYTES
    # A range holds nothing else from its first gradient to the last use of what was received.
    held = [one for one in plan.intervals if one.name.startswith("bucket")]
    assert len(held) == 4
    for one in held:
        for other in plan.intervals:
            is_apart = one.last_use < other.first_use or other.last_use < one.first_use
            below = one.offset_bytes + one.nbytes <= other.offset_bytes
            above = other.offset_bytes + other.nbytes <= one.offset_bytes
            assert one is other or is_apart or below or above
    # Nothing is copied together or apart.
    assert not any("copy" in call.ops for call in plan.calls)


@pytest.mark.parametrize("norm", [False, True])
def test_exchanges_begin_early_and_end_before_the_state_is_written(*, norm: bool) -> None:
    mod, step = planned(norm=norm, sizes=BucketSizes(4200, 4200))
    plan = step.plan
    gradients = [k for k in places(plan, START_SYMBOL) if "all_reduce_start" in plan.calls[k].ops]
    waits = places(plan, WAIT_SYMBOL)
    backward = [
        k
        for k, call in enumerate(plan.calls)
        if any(one.phase == "backward" for one in call.locations)
        and call.symbol not in (START_SYMBOL, WAIT_SYMBOL)
    ]
    # Most of the backward pass is still to come when the first bucket is sent.
    assert sum(k > gradients[0] for k in backward) >= len(backward) // 2
    last = [k for k in waits if "all_reduce_wait" in plan.calls[k].ops]
    assert min(last) > max(backward)
    # If an exchange fails, nothing has been written that is not saved.
    assert plan.writes.first_call > max(waits)
    order = [
        found.bucket
        for binding in Dataflow(step.ir).bindings
        if (found := read_collective(binding.value)) is not None
        and str(binding.value.op.global_symbol) == START_SYMBOL
    ]
    assert order == sorted(order)
    del mod


def test_inputs_are_copied_into_their_bucket_by_a_call_of_their_own() -> None:
    _, step = planned(norm=True)
    sent = [call for call in step.plan.calls if call.ops == ("broadcast_start",)]
    copies = [call for call in step.plan.calls if call.symbol.startswith("sent_copy_")]
    # Mean, variance and the count of batches of four layers; and their gradients, which are part
    # of the gradient of the input too.
    assert len(sent) == 2 and len(copies) == 12 + 8
    assert sum(call.written_nbytes for call in copies) == 4 * (4 * 32 * 4 + 8)


def test_gradients_that_stay_are_copied_out_by_the_wait() -> None:
    mod, step = planned(keeps=True)
    names = {one.name for one in mod.signature.outputs}
    assert "0.weight.grad" in names
    # Nothing reads a bucket after the step.
    assert all(one.last_use < len(step.plan.calls) for one in step.plan.intervals)
