# SPDX-License-Identifier: Apache-2.0
"""An error report measures what each op's rounding alone does, and finds a planted culprit."""

from __future__ import annotations

import json
import math
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir
from amp_ir.cli import main
from amp_ir.report.step_page import _error_section
from amp_ir.verification import contributions as module_of_contributions


def model_and_step() -> tuple[nn.Module, Any, tuple[torch.Tensor, torch.Tensor]]:
    model = nn.Sequential(
        nn.Linear(12, 24), nn.GELU(), nn.Dropout(0.5), nn.Sequential(nn.Linear(24, 24), nn.Tanh())
    )

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss.detach()

    return model, step, (torch.randn(32, 12), torch.randn(32, 24))


def test_the_parts_add_up_to_the_whole():
    model, step, batch = model_and_step()
    found = amp_ir.error_report(step, batch, model=model)
    assert found.is_complete
    assert 1e-4 < found.error < 1e-2
    # Independent roundings add up as squares do; some are not independent.
    together = math.hypot(*(one.error for one in found.contributions))
    assert together == pytest.approx(found.error, rel=0.35)
    errors = [one.error for one in found.contributions]
    assert errors == sorted(errors, reverse=True)
    assert all(one.op and one.roundings for one in found.contributions)
    names = {one.name for one in found.contributions}
    assert "casts for relax.matmul in 3.0 (forward)" in names
    assert any(one.phase == "backward" for one in found.contributions)
    verified = amp_ir.verify(step, batch, model=model, check=False)
    assert found.error == pytest.approx(verified.draws[0]["amp_ir low, strict"].gradient, rel=0.35)


def test_a_planted_culprit_comes_first():
    weight = nn.Parameter(torch.rand(12) + 20.0)
    holder = nn.ParameterDict({"weight": weight})

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        sums = torch.cumsum(x * holder["weight"], 1)
        loss = F.mse_loss(sums[:, 1:] - sums[:, :-1], y)
        loss.backward()
        return loss.detach()

    batch = torch.rand(16, 12), torch.rand(16, 11)
    low = [amp_ir.Override(op="relax.cumsum", phase="forward", to="low")]
    found = amp_ir.error_report(step, batch, model=holder, overrides=low)
    assert found.contributions[0].op == "relax.cumsum"
    assert found.contributions[0].error > 0.5 * found.error
    assert found.contributions[0].worst_parameter == "weight"
    assert "cumsum" in str(found).splitlines()[1]


def test_without_time_it_stays_one_group():
    model, step, batch = model_and_step()
    found = amp_ir.error_report(step, batch, model=model, seconds=0.0)
    (whole,) = found.contributions
    assert not found.is_complete
    assert whole.error == found.error
    assert whole.name == f"{whole.roundings} roundings in step, not split"
    assert str(found).endswith("; groups were left whole for lack of time")


def test_without_time_the_rest_is_float32(monkeypatch):
    model, step, batch = model_and_step()
    exact = amp_ir.error_report(step, batch, model=model)
    assert (exact.evaluated_in, exact.noise) == ("float64", 0.0)
    assert "alone, in float64 otherwise:" in str(exact)
    quick = amp_ir.error_report(step, batch, model=model, seconds=0.0)
    assert quick.evaluated_in == "float32"
    # Some roundings of float32, 2^-24 each.
    assert 1e-9 < quick.noise < 1e-6
    assert quick.error == pytest.approx(exact.error, rel=1e-3)
    assert "alone, in float32 otherwise:" in str(quick)
    assert f"; float32's own error: {quick.noise:.1e}; groups" in str(quick)
    # Where float32's own error is not small beside it, float64 takes its time.
    monkeypatch.setattr(module_of_contributions, "_NOISE_SHARE", 1e-9)
    slow = amp_ir.error_report(step, batch, model=model, seconds=0.0)
    assert (slow.evaluated_in, slow.error) == ("float64", exact.error)


def test_every_op_is_measured_in_float32_as_in_float64(monkeypatch):
    model, step, batch = model_and_step()
    exact = {one.name: one for one in amp_ir.error_report(step, batch, model=model).contributions}
    # So many ops that no time is enough for them in float64.
    leaves = module_of_contributions._leaves
    counts = iter([10**9])
    monkeypatch.setattr(
        module_of_contributions, "_leaves", lambda group: next(counts, leaves(group))
    )
    found = amp_ir.error_report(step, batch, model=model)
    assert (found.evaluated_in, found.is_complete) == ("float32", True)
    assert {one.name for one in found.contributions} == set(exact)
    for one in found.contributions:
        assert one.error == pytest.approx(exact[one.name].error, rel=1e-2, abs=found.noise)


def test_groups_come_first_where_time_is_short(monkeypatch):
    model, step, batch = model_and_step()
    ticks = iter(range(10**6))
    clock = types.SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr(module_of_contributions, "time", clock)
    # Each look at the clock takes a second, so that an evaluation takes one or two.
    found = amp_ir.error_report(step, batch, model=model, seconds=12.0)
    assert not found.is_complete
    assert 1 < len(found.contributions) < 12
    assert any(not one.op for one in found.contributions)
    assert found.contributions[0].error < found.error


def test_infinite_errors_have_full_bars():
    model = nn.Linear(8, 8)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) * 3e4).square().mean()
        loss.backward()
        return loss.detach()

    low = [amp_ir.Override(op="relax.multiply", to="low")]
    found = amp_ir.error_report(
        step, (torch.randn(4, 8),), model=model, amp_dtype="float16", overrides=low
    )
    assert found.error == math.inf
    assert f"inf  {'#' * 24}" in str(found)
    assert "width:100.0%" in found.to_html()
    assert "nan" not in found.to_html()
    section = _error_section(found)
    assert "inf" in section
    assert "nan" not in section


def test_a_step_that_rounds_nothing_has_no_contributions():
    model = nn.Embedding(10, 4)

    def step(index: torch.Tensor) -> torch.Tensor:
        loss = torch.lgamma(model(index).abs() + 1).sum()
        loss.backward()
        return loss.detach()

    found = amp_ir.error_report(step, (torch.randint(0, 10, (6,)),), model=model)
    assert (found.error, found.contributions, found.is_complete) == (0.0, (), True)


def test_nothing_of_the_users_changes():
    model, step, batch = model_and_step()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    amp_ir.error_report(step, batch, model=model, seconds=0.0)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(one.grad is None for one in model.parameters())
    assert model[2].p == 0.5


def test_float32_rounds_nothing():
    model, step, batch = model_and_step()
    with pytest.raises(amp_ir.errors.OptionError) as caught:
        amp_ir.error_report(step, batch, model=model, amp_dtype="float32")
    assert str(caught.value) == (
        "amp_dtype='float32' rounds nothing; expected 'float16' or 'bfloat16'"
    )


def test_the_command_writes_table_json_and_page(tmp_path, capsys):
    data, page = tmp_path / "errors.json", tmp_path / "errors.html"
    options = ["--seconds", "1", "--json", str(data), "--html", str(page)]
    assert main(["errors", "mlp", "--small", *options]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Training.step in bfloat16: relative gradient error ")
    found = json.loads(data.read_text())
    assert found["contributions"][0]["error"] > 0
    assert found["evaluations"] > 2
    assert "<th>Error alone</th>" in page.read_text()
