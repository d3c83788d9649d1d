# SPDX-License-Identifier: Apache-2.0
"""Scripts that make their parts in `main()`, as the commands take them."""

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import amp_ir
from amp_ir import cli
from amp_ir.demo.training_file import load_training
from amp_ir.errors import OptionError

SCRIPT = """
import argparse
import torch
import amp_ir


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=4)
    width = parser.parse_args().width
    torch.manual_seed(0)
    model = torch.nn.Linear(width, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x, y):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    train = amp_ir.jit(train_step, model=model, optimizer=optimizer)
    try:
        for _ in range(3):
            train(torch.randn(2, width), y=torch.tensor([0, 2]))
            print("a step ran")
    except Exception:
        print("the script went on")


if __name__ == "__main__":
    main()
"""
THROUGH_JIT = (
    "define `step`, `batch` and `model` at its top level: `amp-ir examine --help` shows a file "
    "that the commands take; or, where a function such as main() makes them, have it call the step "
    "through amp_ir, and the commands take them from its first call: `train = amp_ir.jit(step, "
    "model=model, optimizer=optimizer)` and `train(*batch)`"
)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_the_first_call_gives_step_batch_and_owners(script: Path, capsys: Any) -> None:
    found = load_training(script, ["--width", "6"])
    assert found.step.__name__ == "train_step"
    assert [tuple(one.shape) for one in found.batch] == [(2, 6), (2,)]
    assert isinstance(found.model, torch.nn.Linear)
    assert isinstance(found.optimizer, torch.optim.SGD) and found.scaler is None
    shown = capsys.readouterr()
    assert shown.out == ""  # no step ran, and the script did not go on
    assert shown.err == (
        f"{script} does not define all of step, batch, model at its top level, so it runs as a "
        "script until it calls a step of amp_ir.jit\n"
        "took main.train_step (line 15) and its batch, model and optimizer from its first "
        "call, and stopped the script there; casts, device and other options are those of this "
        "command, not of jit\n"
    )


def test_steps_run_again_afterwards(script: Path) -> None:
    found = load_training(script)
    before = found.model.weight.clone()  # type: ignore[union-attr, operator]
    amp_ir.jit(found.step, model=found.model, optimizer=found.optimizer)(*found.batch)
    assert not torch.equal(before, found.model.weight)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize(
    "words",
    [
        "examine", "explain", "errors", "verify", "advise", "search --max-error 0.5",
        "profile --steps 1", "report --steps 1 --out {}", "compile --out {}", "plan save --out {}",
    ],
)  # fmt: skip
def test_every_command_takes_such_a_script(script: Path, words: str, tmp_path: Path) -> None:
    whole = words.format(tmp_path / "out").split()
    at = 2 if whole[0] == "plan" else 1
    code = cli.main([*whole[:at], str(script), *whole[at:]])
    # 1: the search found that no plan is faster than float32, which depends on the machine.
    assert code == 0 or (code == 1 and whole[0] == "search")


def test_a_script_that_catches_everything_is_stopped_all_the_same(script: Path) -> None:
    script.write_text(SCRIPT.replace("except Exception:", "except BaseException:\n        exit(1)"))
    assert load_training(script).step.__name__ == "train_step"


def test_a_script_that_never_calls_its_step(script: Path) -> None:
    script.write_text(SCRIPT.replace("range(3)", "range(0)"))
    with pytest.raises(OptionError) as caught:
        load_training(script)
    assert str(caught.value) == (
        f"{script} ran to its end and called no step of amp_ir.jit; {THROUGH_JIT}"
    )


def test_the_hint_of_a_script_without_jit_leads_to_one_that_is_taken(script: Path) -> None:
    made = "    train = amp_ir.jit(train_step, model=model, optimizer=optimizer)\n"
    without = SCRIPT.replace("import amp_ir\n", "").replace(made, "    train = train_step\n")
    script.write_text(without)
    with pytest.raises(OptionError, match=r"`train = amp_ir.jit\(step, model=model, optimizer="):
        load_training(script)
    script.write_text(without.replace("    train = train_step\n", f"    import amp_ir\n{made}"))
    assert load_training(script).step.__name__ == "train_step"


def test_a_loop_at_the_top_level_is_stopped_too(tmp_path: Path) -> None:
    lines = SCRIPT.partition("def main():")[2].partition("if __name__")[0]
    path = tmp_path / "train.py"
    path.write_text(f"import argparse, torch, amp_ir\n{textwrap.dedent(lines)}")
    assert len(load_training(path).batch) == 2


def test_a_file_with_all_parts_at_its_top_level_does_not_run_its_loop(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import amp_ir\nfrom torch.nn import Linear\nmodel = Linear(2, 2)\n"
        "if True:\n    batch = ()\ndef step(): ...\n"
        "if __name__ == '__main__':\n    amp_ir.jit(step, model=model)()\n"
    )
    assert load_training(path).batch == ()


AVERAGED = """
import copy
import torch
import amp_ir

model = torch.nn.Linear(4, 3)
ema = copy.deepcopy(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = (torch.randn(2, 4),)


def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    for mine, averaged in zip(model.parameters(), ema.parameters()):
        averaged.data.lerp_(mine.data, 0.1)
    return loss.detach()


if __name__ == "__main__":
    train = amp_ir.jit(step, model=[model, ema], optimizer=optimizer)
    train(*batch)
"""


@pytest.mark.parametrize("command", ["examine", "explain"])
def test_what_jit_is_given_below_is_what_the_commands_take(
    command: str, tmp_path: Path, capsys: Any
) -> None:
    """They took `model` alone, and refused the step for what they had left out."""
    path = tmp_path / "train.py"
    path.write_text(AVERAGED)
    assert cli.main([command, str(path)]) == 0
    assert "took model=[model, ema] of the call of jit in line 23\n" in capsys.readouterr().err
    assert [type(one) for one in load_training(path).model] == [torch.nn.Linear] * 2  # type: ignore[union-attr]


@pytest.mark.parametrize("passed", ["model", "[model]", "model, optimizer=optimizer, scaler=None"])
def test_nothing_is_said_where_jit_is_given_the_names(
    passed: str, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "train.py"
    path.write_text(AVERAGED.replace("[model, ema], optimizer=optimizer", passed))
    assert isinstance(load_training(path).model, torch.nn.Linear)
    assert capsys.readouterr().err == ""


def test_what_jit_is_given_and_the_file_does_not_name_is_told(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "train.py"
    path.write_text(AVERAGED.replace("[model, ema]", "[model, make_ema(model)]"))
    assert isinstance(load_training(path).model, torch.nn.Linear)
    assert capsys.readouterr().err == (
        f"`model` at the top level of {path} is taken, and not model=[model, make_ema(model)] of "
        "the call of jit in line 23, which is no name or list of names that are there; make "
        "`model` there what the call passes\n"
    )
    text = AVERAGED
    for old, new in (
        ("model.p", "model[0].p"),
        ("model(x)", "model[0](x)"),
        ("model=[model, ema]", "model=model"),
        ("optimizer =", "model = [model, ema]\noptimizer ="),
    ):
        text = text.replace(old, new)
    path.write_text(text)  # the hint
    assert len(load_training(path).model) == 2  # type: ignore[arg-type]
    assert capsys.readouterr().err == ""
