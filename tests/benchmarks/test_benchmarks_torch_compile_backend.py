# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the backend of torch.compile: a row in small shapes, without Inductor."""

from __future__ import annotations

import pytest
import torch
from benchmarks import torch_compile_backend
from benchmarks.torch_compile_backend import Row


def test_the_variants_compute_gradients_and_take_time(monkeypatch):
    monkeypatch.setattr(torch_compile_backend, "_DROPOUT", 0.0)
    made = []

    def made_step(*args, **options):
        made.append(step := make_step(*args, **options))
        return step

    make_step = torch_compile_backend.make_step
    # Inductor calls a C++ compiler for seconds.
    monkeypatch.setattr(torch_compile_backend, "VARIANTS", ("amp_ir", "eager"))
    monkeypatch.setattr(torch_compile_backend, "make_step", made_step)
    row = torch_compile_backend.measure("mlp", "bfloat16", turns=1, small=True)
    assert row.ratio("eager") > 0 and row.first_seconds["amp_ir"] > 0
    gradients = []
    for step in made:
        training = next(
            cell.cell_contents
            for cell in step.__closure__
            if isinstance(cell.cell_contents, torch_compile_backend.Training)
        )
        gradients.append([one.grad for one in training.model.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        # bfloat16 has 8 significant bits: 2^-8 a rounding, through three layers.
        assert torch.linalg.norm(ours - theirs) < 0.05 * torch.linalg.norm(theirs)


def test_a_row_is_a_line_of_the_pages_table():
    row = Row(
        "mlp",
        "float32",
        {"amp_ir": 2.0, "inductor": 3.0, "eager": 5.0},
        {"amp_ir": 7.4, "inductor": 30.2, "eager": 0.1},
    )
    assert str(row) == "| mlp, float32 | 1.50 | 2.50 | 7, 30 |"


def test_an_unknown_workload_is_refused():
    with pytest.raises(SystemExit, match="bert2: expected some of bert1, mlp, gpt2"):
        torch_compile_backend.main(["bert2"])
