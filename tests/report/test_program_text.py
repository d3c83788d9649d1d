# SPDX-License-Identifier: Apache-2.0
"""The program after every stage as text: golden files, and the ways to ask for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir import cli, pipeline
from amp_ir.errors import OptionError, StateError
from amp_ir.ir.stages import Stage
from amp_ir.ir.target import parse_target
from amp_ir.report.program_text import program_text
from amp_ir.report.stage_files import writing_stages

GOLDEN = Path(__file__).parent / "golden"
STAGES = ["capture", "import", "loss_scaling", "rewrites", "amp", "checks", "decompose"]
STAGES += ["dispatch", "loops", "memory"]


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer):
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def records() -> dict[str, Stage]:
    """What every stage hands over, for a GPU: what is written for it is not a machine's own."""
    model, optimizer = training()
    found: list[Stage] = []
    owners = {"model": model, "optimizer": optimizer, "scaler": None}
    step = step_of(model, optimizer)
    mod = pipeline.import_step(step, (torch.randn(6, 8),), on_stage=found.append, **owners)
    mod = pipeline.rewrite(mod, on_stage=found.append)
    before = mod.ir
    mod = amp_ir.autocast(mod, amp_dtype="bfloat16")
    found.append(Stage("amp", 0.0, before, mod.ir))
    pipeline.lower(mod, target=parse_target("sm_90"), on_stage=found.append)
    return {one.name: one for one in found}


def test_every_stage_is_handed_over_in_order():
    assert list(records()) == STAGES


@pytest.mark.parametrize("name", ["import", "rewrites", "amp", "dispatch", "loops", "memory"])
def test_the_text_of_a_stage_is_the_golden_one(name):
    text = re.sub(r"\d+\.\d ms", "0.0 ms", program_text(records()[name]))
    # A line of this file moves with every line above it.
    text = re.sub(r"(test_program_text\.py):\d+", r"\1:N", text)
    assert text == (GOLDEN / f"{name}.txt").read_text()


def test_external_calls_are_written_as_calls_of_the_op_itself():
    """In every form: the dialect's op, PyTorch's call, the planned one."""

    def step(x):
        lower = torch.linalg.cholesky(x @ x.mT + torch.eye(4))
        loss = torch.lgamma(lower.diagonal()).sum()
        return loss + torch.linalg.solve_triangular(lower, x, upper=False).sum()

    mod, _ = amp_ir.trace_step(step, (torch.randn(4, 4),), model=nn.Linear(1, 1))
    amp_mod = amp_ir.autocast(mod, amp_dtype="bfloat16")
    found = {"amp": Stage("amp", 0.0, None, amp_mod.ir)}
    pipeline.lower(
        amp_mod, target=parse_target("sm_90"), on_stage=lambda one: found.update({one.name: one})
    )
    text = ""
    for name in ("amp", "decompose", "loops", "memory"):
        lines = program_text(found[name]).splitlines()
        lines = [line.partition("  #")[0].rstrip() for line in lines if "aten::" in line]
        text += "\n".join([f"after {name}:", *lines, ""])
    assert text == (GOLDEN / "external_calls.txt").read_text()
    ops = [one for one in amp_ir.explain_plan(amp_mod).ops if one.name.startswith("aten::")]
    names = ["aten::linalg_cholesky_ex", "aten::lgamma", "aten::linalg_solve_triangular"]
    assert [one.name for one in ops] == names
    assert len({one.kernel for one in ops}) == 3 and all(one.kernel >= 0 for one in ops)


def test_the_captured_graph_has_types_and_places():
    text = program_text(records()["capture"])
    assert re.search(r"gelu +f32\[6, 16\] +aten\.gelu\(\w+\) +# forward 1; test_program_", text)
    assert re.search(r"\w+ +f32\[6, 16\] +native_layer_norm\[0\] ", text)


def test_a_compiled_step_shows_its_stages():
    model, optimizer = training()
    train = amp_ir.jit(step_of(model, optimizer), model=model, optimizer=optimizer)
    with pytest.raises(StateError, match="has not run yet"):
        train.ir("loops")
    train(torch.randn(6, 8))
    assert "= gelu(lv2)" in train.ir("loops")
    assert re.search(r"f32\[96\] @\d+", train.ir("memory"))
    assert train.ir("amp").startswith("after amp: ")
    message = (
        "ir('fuse'): there is no such stage; give one of amp, checks, decompose, dispatch, loops, "
        "memory. For those before, set the environment variable AMP_IR_DUMP to a folder, which "
        "gets them all"
    )
    with pytest.raises(OptionError) as raised:
        train.ir("fuse")
    assert str(raised.value) == message


def test_the_environment_names_a_folder_for_all_stages(tmp_path, monkeypatch):
    model = nn.Linear(4, 4)

    def step(x):
        loss = model(x).sum()
        loss.backward()
        return loss

    monkeypatch.setenv("AMP_IR_DUMP", str(tmp_path / "dump"))
    mod, args = amp_ir.trace_step(step, (torch.randn(2, 4),), model=model)
    amp_ir.compile(amp_ir.autocast(mod, args, amp_dtype="bfloat16"))
    (folder,) = (tmp_path / "dump").iterdir()
    expected = [f"{number:02}-{name}.txt" for number, name in enumerate(STAGES)]
    assert sorted(file.name for file in folder.iterdir()) == expected


def test_a_capture_that_is_tried_again_is_written_too(tmp_path):
    """`leaky_relu` takes its slope as a constant only, so the number stays a guard."""

    def step(x, slope):
        return nn.functional.leaky_relu(x, slope)

    names, given = frozenset({"argument 1"}), (torch.ones(2), 0.25)
    with writing_stages(tmp_path):
        amp_ir.trace_step(step, given, model=nn.Linear(1, 1), numbers_as_inputs=names)
    expected = ["capture", "capture", "import", "loss_scaling", "rewrites"]
    assert [file.stem.split("-")[1] for file in sorted(tmp_path.iterdir())] == expected


def test_the_command_writes_all_stages(tmp_path, capsys):
    files = ["--out", str(tmp_path / "step.so"), "--dump-ir", str(tmp_path / "ir")]
    assert cli.main(["compile", "mlp", "--small", "--target", "cpu", *files]) == 0
    capsys.readouterr()
    found = sorted(file.name.split("-")[1] for file in (tmp_path / "ir").iterdir())
    assert found == sorted(f"{name}.txt" for name in STAGES)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    files = ["--out", str(tmp_path / "step.so"), "--dump-ir", str(tmp_path / "file" / "ir")]
    assert cli.main(["compile", "mlp", "--small", "--target", "cpu", *files]) == 2
    assert capsys.readouterr().err == (
        "amp-ir compile: no folder for the programs of the stages can be made at "
        f"{tmp_path / 'file' / 'ir'}: Not a directory; name another one with --dump-ir or the "
        "environment variable AMP_IR_DUMP\n"
    )
