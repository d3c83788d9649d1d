# SPDX-License-Identifier: Apache-2.0
"""The `amp-ir demo` command: what it prints, its exit codes, and the workloads it trains."""

from __future__ import annotations

import builtins
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import amp_ir
from amp_ir import cli
from amp_ir.commands import demo as demo_command
from amp_ir.demo import comparison as measured
from amp_ir.demo import low_dtype
from amp_ir.demo.comparison import Comparison, Variant, compare
from amp_ir.demo.ssd import Ssd, anchors
from amp_ir.demo.table import summary
from amp_ir.demo.workloads import WORKLOADS
from device_messages import no_gpu


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich asks these for the width; the table must fit into 80."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


def test_the_table_has_every_quantity_for_the_four_ways(capsys: Any) -> None:
    assert cli.main(["demo", "mlp", "--small", "--steps", "2", "--amp-dtype", "bfloat16"]) == 0
    shown = capsys.readouterr()
    rows = {line[:27].strip(): line[27:].split() for line in shown.out.splitlines()}
    assert shown.out.splitlines()[0] == f"mlp: {WORKLOADS['mlp'].description}"
    for label in ("ms a step", "speed-up over own float32", "loss after 10 steps"):
        assert len(rows[label]) == 4, shown.out
    for label in ("speed-up over PyTorch", "peak MiB", "casts", "compiled kernels"):
        assert rows[label][2:] == ["-", "-"] and "-" not in rows[label][:2], shown.out
    assert all(0.0 < float(peak) < 0.2 for peak in rows["peak MiB"][:2]), shown.out
    assert rows["casts"][0] == "0" and int(rows["casts"][1]) > 0
    assert float(rows["loss off PyTorch float32"][0]) < 1e-5
    assert "3,168 parameters" in shown.out and "Tiny shapes" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80


def test_stages_go_to_stderr_once_each(capsys: Any) -> None:
    cli.main(["demo", "mlp", "--small", "--steps", "3", "--amp-dtype", "bfloat16"])
    assert capsys.readouterr().err.splitlines() == [
        "building mlp",
        "capturing the step, float32",
        "compiling, float32",
        "capturing the step, bfloat16",
        "choosing casts, bfloat16",
        "compiling, bfloat16",
        "training 10 steps: amp_ir float32",
        "training 10 steps: amp_ir bfloat16",
        "training 10 steps: PyTorch float32",
        "training 10 steps: PyTorch bfloat16",
        "timing in turns",
    ]


WRONG = [
    (
        ["demo", "mlp", "--device", "tpu"],
        'amp-ir demo: device=\'tpu\' is not a device; expected "cpu" or "cuda"',
    ),
    (
        ["demo", "mlp", "--device", "cuda"],
        f"amp-ir demo: {no_gpu('cuda')}",
    ),
]
USAGE = [
    ([], "the following arguments are required: COMMAND"),
    (["demo"], "the following arguments are required: workload"),
    (["demo", "bert"], "argument workload: invalid choice: 'bert'"),
    (["demo", "mlp", "--steps", "0"], "'0' is not a number of steps; expected 1 or more"),
    (["demo", "mlp", "--steps", "ten"], "'ten' is not a number of steps; expected 1 or more"),
    (["demo", "mlp", "--amp-dtype", "int8"], "argument --amp-dtype: invalid choice: 'int8'"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_devices_are_refused_with_exit_code_2(
    arguments: list[str], message: str, capsys: Any
) -> None:
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err.strip() == message


@pytest.mark.parametrize(("arguments", "message"), USAGE)
def test_wrong_usage_is_refused_with_exit_code_2(
    arguments: list[str], message: str, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


TRAIN = """# -*- coding: latin-1 -*-
import torch
# A name that is no UTF-8: M\xfcller
model = torch.nn.Linear(2, 2)
batch = (torch.randn(3, 2),)
def step(x):
    return model(x)
"""


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., str]:
    def write(old: str = "", new: str = "") -> str:
        path = tmp_path / "train.py"
        path.write_bytes(TRAIN.replace(old, new).encode("latin-1"))
        return str(path)

    return write


def test_a_file_may_declare_its_encoding(train: Callable[..., str], capsys: Any) -> None:
    assert cli.main(["plan", "save", train(), "--out", "/dev/null"]) == 0


@pytest.mark.parametrize("command", ["verify", "errors", "advise"])
def test_a_step_that_is_refused_is_no_check_that_fails(
    command: str, train: Callable[..., str], capsys: Any
) -> None:
    file = train("    return model(x)", "    return model(x) if model(x).sum() > 0 else x")
    assert cli.main([command, file]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert f"amp-ir {command}: this step cannot be captured, 1 place:" in error


def test_a_model_that_is_none_is_a_wrong_use(train: Callable[..., str], capsys: Any) -> None:
    file = train("torch.nn.Linear(2, 2)", "[torch.nn.Linear(2, 2), 3]")
    assert cli.main(["verify", file]) == 2
    assert capsys.readouterr().err == (
        f"amp-ir verify: `model` in {file} holds a int; expected a torch.nn.Module or a list of "
        "them\n"
    )


@pytest.mark.parametrize("option", ["json", "html"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    option: str, tmp_path: Path, capsys: Any
) -> None:
    outside = tmp_path / "nowhere" / "file"
    assert cli.main(["verify", "missing.py", f"--{option}", str(outside)]) == 2
    assert capsys.readouterr().err == (
        f"amp-ir verify: --{option}={outside}: there is no such folder; make it\n"
    )
    assert cli.main(["verify", "missing.py", f"--{option}", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"amp-ir verify: --{option}={tmp_path} is a folder; name a file in it\n"
    )


def test_a_demo_without_transformers_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    real_import = builtins.__import__

    def without_transformers(name: str, *args: Any) -> Any:
        if name == "transformers":
            raise ImportError(name)
        return real_import(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_transformers)
    assert cli.main(["demo", "bert1", "--small"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "amp-ir demo: this demo's model comes from the package transformers, which is not "
        'installed; install it with: pip install "amp_ir[demo]" (from a checkout: pip install -e '
        '".[demo]"). The demos mlp, lstm and ssd need nothing more'
    )


def test_an_interrupt_ends_the_command_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_command, "compare", interrupted)
    assert cli.main(["demo", "mlp", "--small"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


HARDWARE = [
    ((), None, "bfloat16", "this CPU (isa) has no low-precision hardware: expect no gain"),
    (("bfloat16",), None, "bfloat16", "this CPU multiplies bfloat16 in hardware (isa)"),
    (("float16",), None, "float16", "this CPU multiplies float16 in hardware (isa)"),
    (
        ("bfloat16", "float16"),
        None,
        "bfloat16",
        "this CPU multiplies bfloat16 and float16 in hardware (isa), whose range needs no loss "
        "scaling",
    ),
    (
        ("bfloat16",),
        "float16",
        "float16",
        "as asked; no hardware for it on this CPU: expect it to be slow",
    ),
    (
        ("bfloat16",),
        "bfloat16",
        "bfloat16",
        "as asked; this CPU multiplies bfloat16 in hardware (isa)",
    ),
]


@pytest.mark.parametrize(("hardware", "wanted", "dtype", "reason"), HARDWARE)
def test_the_low_dtype_is_what_the_cpu_has(
    hardware: tuple[str, ...],
    wanted: str | None,
    dtype: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(low_dtype, "_is_native", lambda name: name in hardware)
    monkeypatch.setattr(low_dtype, "_instructions", lambda: "isa")
    choice = low_dtype.choose_low_dtype(wanted)
    assert (choice.dtype, choice.reason) == (dtype, reason)


def test_the_summary_says_what_the_table_says() -> None:
    variants = [
        Variant("amp_ir", "float32", (2.0,) * 9 + (1.0,), 20.0),
        Variant("amp_ir", "bfloat16", (2.0,) * 9 + (1.01,), 10.0),
        Variant("PyTorch", "float32", (2.0,) * 9 + (1.0,), 40.0),
        Variant("PyTorch", "bfloat16", (2.02,) * 10, 12.5),
    ]
    text = summary(Comparison(WORKLOADS["mlp"], 1, 10, *variants))
    assert text == (
        "bfloat16 takes 0.50x the time of float32 and 0.80x that of PyTorch's autocast. Over 10 "
        "steps its losses stay within 1.0e-02 of PyTorch's float32 ones; autocast's within 1.0e+00."
    )


def test_a_slow_variant_is_stopped_and_said(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(measured, "_TRAINING_SECONDS", 1e-9)
    assert cli.main(["demo", "mlp", "--small", "--steps", "2", "--amp-dtype", "bfloat16"]) == 0
    shown = capsys.readouterr().out
    rows = {line[:27].strip(): line[27:].split() for line in shown.splitlines()}
    assert rows["loss after 10 steps"] == ["-"] * 4, shown
    assert all(float(ms) > 0 for ms in rows["ms a step"]), shown
    said = " ".join(shown.split())
    assert (
        "PyTorch bfloat16 was stopped after 1 step of 0 s: its ms is that step's, and its losses "
        "are compared over 1." in said
    )
    assert "Over 1 step its losses stay within" in said


def test_a_workload_is_the_same_for_a_seed_and_leaves_the_random_state() -> None:
    before = torch.get_rng_state()
    first, again = (WORKLOADS["lstm"].make(small=True, seed=3) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    pairs = zip(first.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(first.batch[0], again.batch[0])


def test_dropout_can_be_switched_on() -> None:
    training = WORKLOADS["mlp"].make(small=True, dropout=0.5)
    losses = {training.loss(*training.batch).item() for _ in range(4)}
    assert len(losses) == 4


def test_ssd_has_the_anchors_of_its_maps() -> None:
    assert anchors(512) == 6132
    model = Ssd(3, 8, (1, 1, 1, 1), (16, 16, 8, 8))
    boxes, scores = model(torch.randn(2, 3, 64, 64))
    assert boxes.shape == (2, anchors(64), 4) and scores.shape == (2, anchors(64), 4)


def test_turns_are_taken_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    real_turn = measured._Runner.take_turn

    def turn(runner: Any) -> None:
        taken.append(f"{runner.title} {runner.dtype}")
        real_turn(runner)

    monkeypatch.setattr(measured._Runner, "take_turn", turn)
    result = compare(WORKLOADS["mlp"], low_dtype="bfloat16", small=True, steps=2)
    variants = ["amp_ir float32", "amp_ir bfloat16", "PyTorch float32", "PyTorch bfloat16"]
    assert taken == variants * 2
    assert all(len(variant.losses) == measured.COMPARED_STEPS for variant in result.variants)
    assert re.fullmatch(r"\d+", str(result.ours.kernels))


def test_an_option_that_is_not_known_is_told_with_those_of_the_command(
    train: Callable[..., str], capsys: Any
) -> None:
    """And a training file's own is told its place."""
    file = train()
    with pytest.raises(SystemExit) as caught:
        cli.main(["examine", file, "--lr", "0.1"])
    assert caught.value.code == 2
    usage, _, error = capsys.readouterr().err.partition("amp-ir examine: error: ")
    assert usage.startswith("usage: amp-ir examine [-h] [--small] [--json FILE]")
    assert error == (
        f"unrecognized arguments: --lr 0.1; what {file} reads itself follows --: amp-ir examine "
        f"{file} -- --lr 0.1\n"
    )
    with pytest.raises(SystemExit):
        cli.main(["plan", "save", "mlp", "--lr", "0.1"])
    assert capsys.readouterr().err.endswith(
        "amp-ir plan save: error: unrecognized arguments: --lr 0.1\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["search", "--max-error", "nan"], "--max-error=nan; expected a relative error between 0 "
         "and 1, such as 5e-3"),
        (["search", "--max-error", "1e-2", "--seconds", "-1"], "--seconds=-1.0; expected a number "
         "of seconds, 0 or more"),
        (["profile", "--steps", "0"], "--steps=0; expected a whole number of at least 1"),
        (["report", "--errors", "-5"], "--errors=-5.0; expected a number of seconds, 0 or more"),
        (["verify", "--max-ratio", "0"], "--max-ratio=0.0; expected a number above 0"),
        (["plan", "--ranks", "2", "--bandwidth", "1GB/s", "--bucket-cap-mb", "-1"],
         "--bucket-cap-mb=-1.0; expected a number of MiB above 0"),
    ],
)  # fmt: skip
def test_a_number_that_cannot_be_is_refused_before_the_work(
    words: list[str], message: str, capsys: Any
) -> None:
    assert cli.main([*words, "absent.py"]) == 2
    assert capsys.readouterr().err == f"amp-ir {words[0]}: {message}\n"


def test_a_command_without_its_action_lists_them(capsys: Any) -> None:
    for command, actions in (("cache", "info|clear|export|import"), ("plan", "save|diff")):
        with pytest.raises(SystemExit):
            cli.main([command])
        assert capsys.readouterr().err.endswith(
            f"amp-ir {command}: error: the following arguments are required: {actions}\n"
        )


@pytest.mark.parametrize("words", [["advise"], ["search", "--max-error", "0.5"]])
def test_estimates_from_rates_of_a_busy_machine_are_doubted(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Those for a GPU, by its published rates, are not."""

    class Found:
        plan = overrides = None

        def __str__(self) -> str:
            return "found"

    command = importlib.import_module(f"amp_ir.commands.{words[0]}")
    monkeypatch.setattr(command, "load_warning", lambda: "The machine is busy")
    monkeypatch.setattr(amp_ir, "advise", lambda *_args, **_options: Found())
    monkeypatch.setattr(amp_ir, "search_precision", lambda *_args, **_options: Found())
    cli.main([*words, "mlp", "--small"])
    assert capsys.readouterr().err.endswith("The machine is busy\n")
    cli.main([*words, "mlp", "--small", "--gpu", "H100"])
    assert "busy" not in capsys.readouterr().err
