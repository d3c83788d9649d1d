# SPDX-License-Identifier: Apache-2.0
"""The comparison of a step on one thread with the same on several."""

from __future__ import annotations

import pytest
import torch
from benchmarks import threads


def test_a_row_says_what_one_thread_would_cost():
    row = threads.Row("resnet50", 10, 3, {"amp_ir.conv_backward_weight": 2}, 5.0, 3.0, 20.0)
    assert str(row) == (
        "resnet50: 3 of 10 values differ; depend: 2 amp_ir.conv_backward_weight; these take 3 ms "
        "of 20 ms a step, 5 ms on one thread: +10%"
    )


def test_a_workload_of_matmuls_is_compared_and_the_threads_stay(monkeypatch, capsys):
    before = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    try:
        assert threads.main(["mlp", "--small"]) == 0
    finally:
        monkeypatch.undo()
        torch.set_num_threads(before)
    assert capsys.readouterr().out.startswith("mlp: ")


def test_one_thread_is_nothing_to_compare_with(monkeypatch, capsys):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    with pytest.raises(SystemExit):
        threads.main(["mlp"])
    assert "call it where torch.get_num_threads() is 2 or more" in capsys.readouterr().err
