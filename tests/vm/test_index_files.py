# SPDX-License-Identifier: Apache-2.0
"""A step in a file refuses indices out of range, of its batch and its own."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import amp_ir
from amp_ir import pipeline
from amp_ir.host.native import LIBRARY_DIRECTORY
from amp_ir.ir.target import cpu
from amp_ir.standalone import LoadedStep
from amp_ir.vm import build, export

LINE = r", \S+\.py:\d+"


def written(folder: Path) -> tuple[LoadedStep, nn.Module]:
    """A step whose batch holds ids, and whose own are found from its floats."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"table": nn.Embedding(6, 3), "head": nn.Linear(3, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        rows = model["head"](model["table"](ids))
        loss = rows[x.long()].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    batch = torch.tensor([0, 5, 1]), torch.tensor([0.0, 2.0])
    mod, _ = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
    planned = pipeline.lower(mod, host_checks="batch")
    executable = build.compile_executable(planned, cpu())
    export.export_step(executable, planned, mod, cpu(), folder / "step.so")
    export.save_state(mod, folder / "state.npz")
    loaded = LoadedStep(folder / "step.so", state=folder / "state.npz", libraries=LIBRARY_DIRECTORY)
    return loaded, model


def test_a_loaded_step_names_the_index_and_changes_nothing(tmp_path: Path) -> None:
    step, _ = written(tmp_path)
    good = {"batch0": np.array([0, 5, 1]), "batch1": np.array([0.0, -3.0], np.float32)}
    first = step.run(good)["result0"]
    before = step.state()
    assert "index_extremes" not in before
    for name, value, message in (
        ("batch0", np.array([0, 6, 1]),
         r"batch0 holds the index 6, expected 0 to 5, for amp_ir\.embedding in table \(forward\)"
         + LINE + r"\. Nothing was run and nothing has changed"),
        ("batch1", np.array([0.0, 3.0], np.float32),
         r"the step computed the index 3, expected -3 to 2, for amp_ir\.index in step \(forward\)"
         + LINE + r"\. The step was rolled back: nothing has changed"),
    ):  # fmt: skip
        with pytest.raises(IndexError) as caught:
            step.run({**good, name: value})
        assert re.fullmatch(message, str(caught.value))
        after = step.state()
        assert all(np.array_equal(before[one], after[one]) for one in before)
    assert step.run(good)["result0"] < first
