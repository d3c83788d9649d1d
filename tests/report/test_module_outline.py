# SPDX-License-Identifier: Apache-2.0
"""The outline of a plan: every op once, modules nested, layers that are alike on one line."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.report.explain import rows_of
from amp_ir.report.module_outline import OUTLINE_STYLE, outline, outline_of


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.up(self.norm(x)))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(5))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(scope="module")
def plan() -> amp_ir.CastPlan:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    mod, args = amp_ir.trace_step(step, (torch.randn(4, 8),), model=model, optimizer=optimizer)
    plan: amp_ir.CastPlan = amp_ir.autocast(mod, args, amp_dtype="bfloat16").plan
    return plan


def test_the_tree_has_every_op_of_both_passes_once(plan: amp_ir.CastPlan) -> None:
    rows = rows_of(plan)
    found = [row.op.id for row in outline_of(rows).all_rows()]
    assert sorted(found) == [row.op.id for row in rows if row.op.phase != "optimizer"]


def test_layers_that_are_alike_are_one_line_with_the_sums_of_all(plan: amp_ir.CastPlan) -> None:
    rows = rows_of(plan)
    text = outline(rows, plan.amp_dtype)
    ElementTree.fromstring(text)  # well formed
    (first, last, count) = re.findall(r">(\d) – (\d), (\d) alike<", text)[0]
    assert int(last) - int(first) + 1 == int(count) >= 3
    inside = [row for row in rows if first <= row.op.module.partition("layers.")[2][:1] <= last]
    forward = [row for row in inside if row.op.phase == "forward"]
    low = sum("bfloat16" in (*row.op.reads, *row.op.results) for row in forward)
    assert f">{len(forward)} ops, {low} in bf16<" in text


def test_a_module_shows_its_ops_with_dtypes_casts_and_reasons(plan: amp_ir.CastPlan) -> None:
    rows = [row for row in rows_of(plan) if row.op.module == "head" and row.op.phase == "forward"]
    text = outline(rows, plan.amp_dtype)
    assert "matmul" in text and "bf16 → " in text
    assert text.count("cast float32 to bfloat16") == sum(len(row.phrases) for row in rows)
    assert rows[0].op.reason.split(".")[0][:20] in text


def test_the_optimizer_is_in_neither_pass(plan: amp_ir.CastPlan) -> None:
    rows = rows_of(plan)
    line = outline(rows, plan.amp_dtype).partition('<span class="name">optimizer</span>')[2]
    assert line.startswith('<span class="late">')
    count = sum(row.op.phase == "optimizer" for row in rows)
    assert f">{count} op" in line
    assert ".outline .late { grid-column: 2 / -1 }" in OUTLINE_STYLE
