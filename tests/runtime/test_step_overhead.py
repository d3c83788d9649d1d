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
from amp_ir.api import lower
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.runtime import program as programs
from amp_ir.runtime import program_input


def compiled(layers: int) -> tuple[amp_ir.CompiledStep, torch.Tensor]:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batch = (torch.randn(4, 8),)
    mod, _ = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
    return amp_ir.compile(mod), batch[0]


def test_a_step_converts_the_batch_its_results_and_numbers_but_no_state(
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
    # The batch is all that is not a number: the loss, learning rate, betas and so on are.
    assert [shape for shape in counts[0].elements() if shape] == [x.shape]


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
