# SPDX-License-Identifier: Apache-2.0
"""Golden plans: what has changed is named, and how to accept it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.cli import main

FILE = """
import torch

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
batch = (torch.randn(32, 8), torch.randn(32, 4))


def step(x, y):
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss.detach()
"""


def planned(*layers: nn.Module, **options: Any) -> amp_ir.StepModule:
    model = nn.Sequential(nn.Linear(8, 16), *layers, nn.Linear(16, 4))

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    mod, args = amp_ir.trace_step(step, (torch.randn(4, 8),), model=model)
    found: amp_ir.StepModule = amp_ir.autocast(mod, args, amp_dtype="bfloat16", **options)
    return found


@pytest.fixture
def golden(tmp_path):
    path = tmp_path / "plan.json"
    planned(nn.Tanh()).plan.save(path)
    return path


def test_an_equal_plan_matches(golden):
    amp_ir.testing.assert_plan_matches(planned(nn.Tanh()), golden)
    amp_ir.testing.assert_plan_matches(planned(nn.Tanh()).plan, str(golden))


def test_another_dtype_is_named(golden):
    override = amp_ir.Override(op="relax.matmul", module="2", phase="forward", to="float32")
    with pytest.raises(AssertionError) as caught:
        amp_ir.testing.assert_plan_matches(planned(nn.Tanh(), overrides=[override]), golden)
    text = str(caught.value)
    assert text.startswith(f"the cast plan is not that of {golden}:\n")
    assert "relax.matmul in 2: bfloat16 -> float32 becomes float32 -> float32" in text
    assert text.endswith(
        "If that is meant, set AMP_IR_UPDATE_PLANS=1 and run the test once to write it again"
    )


def test_an_op_more_is_named_and_the_others_are_aligned(golden):
    found = amp_ir.CastPlan.load(golden).diff(planned(nn.Tanh(), nn.ReLU()).plan)
    lines = found.splitlines()
    assert any(one.startswith("new: ") and "relax.nn.relu in 2 (forward)" in one for one in lines)
    # The second layer has another path now; the rest is aligned, whether or not it changes.
    others = [one for one in lines if one.startswith(("gone: ", "new: "))]
    assert not any("relax.tanh" in one or " in 0 " in one for one in others)


@pytest.mark.parametrize("update", ["", "1"])
def test_a_folder_is_no_plan(golden, monkeypatch, update):
    """It was an IsADirectoryError, and with the variable set an error of the operating system."""
    monkeypatch.setenv("AMP_IR_UPDATE_PLANS", update)
    folder = golden.parent
    with pytest.raises(amp_ir.errors.OptionError) as caught:
        amp_ir.testing.assert_plan_matches(planned(nn.Tanh()), folder)
    told = folder / "plan.json"
    assert str(caught.value) == (f"{folder} is a folder; name the file of the plan, such as {told}")
    amp_ir.testing.assert_plan_matches(planned(nn.Tanh()), told)


def test_a_missing_plan_says_how_to_write_it(tmp_path, monkeypatch):
    path = tmp_path / "golden" / "plan.json"
    with pytest.raises(AssertionError) as caught:
        amp_ir.testing.assert_plan_matches(planned(), path)
    assert str(caught.value) == (
        f"there is no golden plan {path}; set AMP_IR_UPDATE_PLANS=1 and run the test once to "
        "write it"
    )
    monkeypatch.setenv("AMP_IR_UPDATE_PLANS", "1")
    amp_ir.testing.assert_plan_matches(planned(), path)
    monkeypatch.setenv("AMP_IR_UPDATE_PLANS", "0")
    amp_ir.testing.assert_plan_matches(planned(), path)


def test_a_step_without_casts_is_refused(golden):
    with pytest.raises(amp_ir.errors.OptionError) as caught:
        amp_ir.testing.assert_plan_matches(planned().without_casts(), golden)
    assert str(caught.value) == (
        "StepModule has no cast plan; pass a step that amp_ir.autocast returned, or its plan"
    )


def test_the_commands_save_and_compare_plans(tmp_path, capsys):
    file, old, new = (tmp_path / name for name in ("train.py", "old.json", "new.json"))
    file.write_text(FILE)
    assert main(["plan", "save", str(file), "--out", str(old)]) == 0
    assert main(["plan", "save", str(file), "--out", str(new)]) == 0
    capsys.readouterr()
    assert main(["plan", "diff", str(old), str(new), "--fail-on-change"]) == 0
    assert capsys.readouterr().out == "the plans decide the same\n"
    file.write_text(FILE.replace("GELU", "Tanh"))
    assert main(["plan", "save", str(file), "--out", str(new)]) == 0
    capsys.readouterr()
    assert main(["plan", "diff", str(old), str(new)]) == 0
    assert main(["plan", "diff", str(old), str(new), "--fail-on-change"]) == 1
    text = capsys.readouterr().out
    assert "gone: " in text
    assert "relax.nn.gelu in 1 (forward)" in text


def test_a_plan_that_is_not_there_is_a_wrong_use(tmp_path, capsys):
    assert main(["plan", "diff", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    assert capsys.readouterr().err == (
        f"amp-ir plan: there is no plan {tmp_path / 'a.json'}; amp-ir plan save or plan.save "
        "writes one\n"
    )
    assert main(["plan", "diff", str(tmp_path), str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"amp-ir plan: {tmp_path} is a folder and no plan; amp-ir plan save or plan.save writes one"
        "\n"
    )
