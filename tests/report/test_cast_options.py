# SPDX-License-Identifier: Apache-2.0
"""--policy and --override of the commands decide as their options in Python do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import amp_ir
from amp_ir import cli
from amp_ir.commands.training import EXAMPLE_FILE

FILE = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = (torch.randn(4, 8), torch.randn(4, 3))


def step(x, y):
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
"""
OPTIONS = ["--policy", "conservative", "--override", "module=2,op=relax.matmul,to=float32"]


@pytest.fixture
def training(tmp_path, monkeypatch) -> str:
    (tmp_path / "train.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return "train.py"


def test_a_saved_plan_follows_them(training):
    words = ["plan", "save", training, *OPTIONS, "--override", "module=0,phase=backward,to=low"]
    assert cli.main(words) == 0
    names: dict = {}
    exec(FILE, names)
    mod, args = amp_ir.trace_step(
        names["step"], names["batch"], model=names["model"], optimizer=names["optimizer"]
    )
    overrides = [
        amp_ir.Override(module="2", op="relax.matmul", to="float32"),
        amp_ir.Override(module="0", phase="backward", to="low"),
    ]
    expected = amp_ir.autocast(
        mod, args, amp_dtype=torch.bfloat16, policy="conservative", overrides=overrides
    )
    assert amp_ir.CastPlan.load(Path("plan.json")).hash == expected.plan.hash


def test_other_commands_take_them(training, capsys):
    assert cli.main(["explain", training, *OPTIONS, "--module", "2"]) == 0
    shown = capsys.readouterr().out
    assert "policy conservative" in shown and "override" in shown
    assert "Selected by Override(to='float32', op='relax.matmul', module='2')" in shown
    for command in ("profile", "report", "compile", "verify", "errors"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        text = capsys.readouterr().out
        assert "--override" in text and "--policy" in text
        assert EXAMPLE_FILE.strip() in text and "examples:" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["plan", "save", "--override", "head"],
            "--override 'head' is no selector; expected some of module, op, parameter, phase, and "
            'to, such as "module=encoder.*,op=relax.matmul,to=float32"',
        ),
        (
            ["compile", "--amp-dtype", "float32", "--override", "module=head,to=float32"],
            "--override changes nothing with --amp-dtype float32; leave one out",
        ),
        (
            ["explain", "--override", "module=haed,to=float32"],
            "Override(to='float32', module='haed') selects nothing: no module matches 'haed'",
        ),
    ],
)
def test_a_wrong_selector_is_refused(training, words, message, capsys):
    *before, option, value = words
    assert cli.main([*before, training, option, value]) == 2
    assert message in capsys.readouterr().err
