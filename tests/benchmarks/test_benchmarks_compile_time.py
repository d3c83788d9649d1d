# SPDX-License-Identifier: Apache-2.0
"""The benchmark of compile times: its rows in the shapes of a test."""

from __future__ import annotations

import pytest
import torch
from benchmarks import compile_time
from benchmarks.compile_time import Compiled, Row

from amp_ir.demo.workloads import Training, Workload


def test_every_stage_is_timed_and_deeper_programs_take_no_more_kernels_a_layer():
    one, three = (
        Compiled(**compile_time.measure_ours(f"bert-{count}", "bfloat16", small=True))
        for count in (1, 3)
    )
    assert set(one.seconds) == set(compile_time.STAGES)
    assert min(one.seconds.values()) > 0
    assert one.processor_seconds > 0
    assert 0 < one.kernels <= three.kernels < 2 * one.kernels


def test_state_that_compilation_makes_and_does_not_touch_is_no_memory_of_it(monkeypatch):
    """Twice 16 MiB of moments, which a small compilation needs less than."""

    def build(*, small, dropout):
        model = torch.nn.Linear(2048, 2048)
        optimizer = torch.optim.AdamW(model.parameters())
        return Training(model, optimizer, lambda x: model(x).mean(), (torch.ones(2, 2048),))

    monkeypatch.setattr(compile_time, "workload_of", lambda name: Workload(name, "", build))
    nbytes = compile_time.measure_ours("one layer", "float32", small=True)["nbytes"]
    assert 0 < nbytes < 32 * 2**20


def test_the_table_says_what_a_layer_takes_and_where_torch_was_stopped():
    ours = Compiled(
        dict.fromkeys(compile_time.STAGES, 6.0 / len(compile_time.STAGES)), 4.5, 3 * 2**20, 40
    )
    table = compile_time.table_of(
        [
            Row("bert-3", "float32", ours, 12.0, 240),
            Row("ssd", "bfloat16", ours, None, 240),
            Row("mlp", "bfloat16", ours, None, 0),
        ]
    )
    columns = [list(column.cells) for column in table.columns]
    bert, ssd, mlp = ([str(column[k]) for column in columns] for k in range(3))
    assert bert[-7:] == ["6.0", "4.5", "1.50", "12.0", "0.50", "40", "3"]
    assert ssd[-7:] == ["6.0", "4.5", "", "over 240", "", "40", "3"]
    assert mlp[-4:] == ["not run", "", "40", "3"]


def test_an_unknown_workload_is_refused():
    with pytest.raises(SystemExit, match=r"workload 'bert-x' is not known; expected one of bert1"):
        compile_time.workload_of("bert-x")
