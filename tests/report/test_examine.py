# SPDX-License-Identifier: Apache-2.0
"""`amp_ir.examine` and `amp-ir examine`: what is compiled, external and refused, untrained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import amp_ir
from amp_ir import cli

TRAINS = """\
import torch

model = torch.nn.Linear(6, 6)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = (torch.ones(4, 6),)


def step(x):
    y = torch.sigmoid(model(x)) + 1
    loss = y.lgamma().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


if __name__ == "__main__":
    raise AssertionError("examine trains")
"""
REFUSED = TRAINS.replace(
    "    loss.backward()",
    "    chosen = y[y > 0].tolist() if float(loss.detach()) > 0 else y\n    loss.backward()",
)


def steps(text: str, tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_file_is_examined_and_nothing_is_trained(tmp_path: Path, capsys: Any) -> None:
    file = steps(TRAINS, tmp_path)
    out, issue = tmp_path / "all.json", tmp_path / "issue.md"
    assert cli.main(["examine", str(file), "--json", str(out), "--issue", str(issue)]) == 0
    shown = capsys.readouterr().out
    data = json.loads(out.read_text(encoding="utf-8"))
    external = {one["name"]: one for one in data["ops"] if one["is_external"]}
    assert set(external) == {"aten::lgamma", "aten::digamma"}
    assert external["aten::lgamma"]["places"] == [f"step (forward), {file}:10"]
    assert external["aten::digamma"]["places"] == [f"step (backward), {file}:10"]
    # Both read and write tensors f32[4, 6].
    assert {one["nbytes"] for one in external.values()} == {2 * 4 * 6 * 4}
    count = sum(one["calls"] for one in data["ops"])
    assert data["compiled_share"] == pytest.approx((count - 2) / count)
    assert 0 < data["compiled_share_of_bytes"] < 1 and data["refused"] == []
    headline = f"step (train.py:8) can be compiled: {count - 2} of {count} ops "
    assert shown.startswith(headline) and ", 2 are PyTorch's own" in shown
    text = issue.read_text(encoding="utf-8")
    assert text.splitlines()[2] == data["headline"] and f"amp_ir {amp_ir.__version__}" in text
    assert "- PyTorch's own: aten::lgamma, 1 call" in text


def test_what_is_refused_is_listed_with_lines_and_advice(tmp_path: Path, capsys: Any) -> None:
    file = steps(REFUSED, tmp_path)
    out = tmp_path / "all.json"
    assert cli.main(["examine", str(file), "--json", str(out)]) == 1
    data = json.loads(out.read_text(encoding="utf-8"))
    assert [one["place"] for one in data["refused"]] == [f"step (forward), {file}:11"] * 2
    assert data["refused"][1]["what"] == (
        "calls tolist on what a mask selects, x[mask], whose number of rows the data decide"
    )
    assert data["refused"][1]["advice"].startswith("A compiled step has fixed shapes. What")
    assert (data["ops"], data["compiled_share"]) == ([], 0.0)
    assert capsys.readouterr().out.startswith(
        "step (train.py:8) cannot be compiled: 2 places\n  1. "
    )


def test_the_function_returns_the_same_and_changes_nothing() -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    before = model.weight.clone()
    found = amp_ir.examine(step, (torch.ones(2, 3),), model=model, optimizer=optimizer)
    assert found.compiled_share == found.compiled_share_of_bytes == 1.0 and not found.external
    assert "none is PyTorch's own" in str(found) and "relax.matmul" in str(found)
    assert torch.equal(model.weight, before) and not optimizer.state
    # What is wrong with the arguments is refused too, and the hint works.
    wrong = amp_ir.examine(step, torch.ones(2, 3), model=model)  # type: ignore[arg-type]
    assert "expected the tuple of the step's arguments" in wrong.issue_text()


@pytest.mark.parametrize(
    "command", ["examine", "explain", "profile", "report", "compile", "verify"]
)
def test_every_command_takes_a_workload_or_a_file_and_shows_an_example(
    command: str, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main([command, "--help"])
    shown = capsys.readouterr().out
    assert done.value.code == 0
    assert "WORKLOAD|FILE" in shown and "--small" in shown
    assert f"examples:\n  amp-ir {command} " in shown and f"amp-ir {command} train.py" in shown
    assert "def step(inputs, targets)" in shown
    assert cli.main([command, "absent.py"]) == 2
    assert "absent.py is neither a workload nor a file" in capsys.readouterr().err


def test_explain_takes_a_file(tmp_path: Path, capsys: Any) -> None:
    file = steps(TRAINS, tmp_path)
    page = tmp_path / "plan.html"
    assert cli.main(["explain", str(file), "--html", str(page)]) == 0
    assert "matmul" in capsys.readouterr().out
    assert "train.py in bfloat16" in page.read_text(encoding="utf-8")
