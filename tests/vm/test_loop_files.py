# SPDX-License-Identifier: Apache-2.0
"""A step with loops as a file: it names the loop's library, and runs without amp_ir."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir import pipeline
from amp_ir.ir.target import cpu
from amp_ir.vm import build, export
from standalone_runs import STEPS, run_alone, write_batch


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 4)

    def forward(self, x):
        h = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            h = torch.tanh(h @ self.weight + x[:, t]) + x[:, t]
        return h


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_loop_runs_with_the_runtime_alone(tmp_path):
    torch.manual_seed(0)
    model = Loop()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = (model(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss

    # Entries of 160 bytes, which are not aligned: a loop reads and writes them through copies.
    batch = (torch.randn(5, 20, 8),)
    mod, args = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
    mod = amp_ir.autocast(mod, args, amp_dtype="bfloat16")
    planned = pipeline.lower(mod, host_checks="batch")
    executable = build.compile_executable(planned, cpu())
    written = export.export_step(executable, planned, mod, cpu(), tmp_path / "step.so")
    assert written.library_calls["amp_ir.loop.run"] == 2
    export.save_state(mod, tmp_path / "state.npz")
    write_batch(SimpleNamespace(batch=batch), mod, tmp_path)
    compiled = amp_ir.compile(mod)
    expected = [[float(compiled(*batch))] for _ in range(STEPS)]
    losses, modules, loaded = run_alone(tmp_path)
    assert losses == expected
    assert modules == [] and loaded == []
