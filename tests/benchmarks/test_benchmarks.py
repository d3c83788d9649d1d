# SPDX-License-Identifier: Apache-2.0
"""The table beside PyTorch: rows are what was measured, an interrupt keeps them, all fits."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from benchmarks import __main__ as command
from benchmarks.compiled_error import CompiledError
from benchmarks.peers import in_layout
from benchmarks.resident import measured_bytes
from benchmarks.speed_of_light import peaks_of
from benchmarks.step_row import COLUMNS, Asked, Row, measure
from benchmarks.step_table import footnotes, table_of
from benchmarks.workloads.further import ALL
from rich.console import Console

import amp_ir
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.host import native


def row(workload: str = "resnet50", dtype: str = "bfloat16", **known: Any) -> Row:
    """A row with every number, none of them measured."""
    variants = {"eager": 400.0, "eager channels_last": 250.0, "compile": 1000.0}
    full = Row(
        workload, dtype, {"ours": 100.0, **variants}, {"ours": 12.5, "compile": 126.2}, 1400.0,
        {"ours": 1401.0, **dict.fromkeys(variants, 2000.0)}, 939, 7, 285, {}, 25.0, 1.5, 150.0,
        CompiledError(4.1e-3, 5e-3, 0.82, 5),
    )  # fmt: skip
    return attrs.evolve(full, **known)


def text_of(rows: list[Row], width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(table_of(rows, width))
    return console.export_text().splitlines()


def test_the_better_layout_of_pytorch_is_the_peer_and_is_marked() -> None:
    one = row()
    assert one.best("eager") == ("eager channels_last", 250.0)
    assert (one.ratio("eager"), one.ratio("compile"), one.ratio()) == (0.4, 0.1, 0.4)
    assert one.speed_of_light_share == 0.25 and one.outside_share == 0.01
    line = text_of([row(dtype="float32", milliseconds={"ours": 180.0}), one], 120)[4]
    assert line.split() == [
        *("bf16", "100", "250*", "1000", "0.40", "0.10", "0.40", "1.80", "12.5", "126.2"),
        *("1400", "1401", "2000", "2000", "25%", "1.0%", "4.1e-3", "0.82", "939", "(7)"),
    ]
    assert any(note.startswith("*: in channels_last") for note in footnotes([one]))


@pytest.mark.parametrize("width", [120, 160])
def test_all_columns_fit_a_terminal(width: int) -> None:
    lines = text_of([row(name, dtype) for name in ALL for dtype in command.DTYPES], width)
    assert not any("…" in line for line in lines)
    assert max(map(len, lines)) <= width


def test_a_torch_compile_that_fails_costs_its_column_and_no_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(step: Any) -> Any:
        def fail() -> None:
            raise RuntimeError("no backend\nand more")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    one = measure("mlp", "float32", Asked(frozenset({"compile"}), 1, 1, small=True), lambda _: None)
    assert set(one.milliseconds) == {"ours", "eager"}
    assert one.failed == {"compile": "no backend"}
    assert "failed" in text_of([one], 120)[-1].split()
    assert "mlp float32: compile failed: no backend" in footnotes([one])


def test_columns_that_were_not_asked_for_are_left_out() -> None:
    bare = row(
        milliseconds={"ours": 100.0, "eager": 200.0}, measured_mib={},
        speed_of_light_milliseconds=None,
        compile_seconds={"ours": 1.0}, outside_milliseconds=None, error=None,
    )  # fmt: skip
    heads = " ".join(text_of([bare], 120)[:2]).split()
    assert not {"comp", "cold", "roofline", "error", "host"} & set(heads)
    assert not any("AMP" in note or "torch.compile's" in note for note in footnotes([bare]))
    assert not any("torch.compile with" in note or "float64" in note for note in footnotes([bare]))


@pytest.mark.skipif(not native.has("amp_ir.call_clock.take"), reason="this build has no clock")
def test_a_row_is_measured() -> None:
    told: list[str] = []
    asked = Asked(frozenset({"peak", "roofline", "error"}), rounds=1, draws=1, small=True)
    one = measure("mlp", "bfloat16", asked, told.append)
    assert set(one.milliseconds) == {"ours", "eager"} == set(one.measured_mib)
    assert min(one.milliseconds.values()) > 0 and set(one.compile_seconds) == {"ours"}
    # One batch, one seed: the steps are the same but for roundings.
    assert one.losses["ours"] == pytest.approx(one.losses["eager"], rel=2**-8)
    assert one.error is not None and 0 < one.error.ours < 0.1
    assert one.speed_of_light_share is not None and one.speed_of_light_share > 0
    assert "bfloat16" in one.peaks and one.peaks.endswith("medians of turns between the steps")
    assert one.outside_share is not None and 0 < one.outside_share < 1
    assert one.casts > 0 and one.calls > one.casts
    assert told[0] == "compiling ours"


def test_the_speed_of_light_is_at_the_rates_of_the_turns() -> None:
    # Per turn 3 products of 2048^3 each, and 3 copies of 128 MiB, which read and write.
    trials = {"float32 torch": 600.0, "float32 onednn": 300.0, "bfloat16 torch": 30.0}
    took = {f"{name} 2048 x 2048 x 2048": value for name, value in trials.items()}
    peaks = peaks_of({**took, "copy": 300.0})
    assert peaks.gflop_per_second["float32"] == pytest.approx(2 * 2.048**3 / 0.1)
    assert peaks.gflop_per_second["bfloat16"] == pytest.approx(2 * 2.048**3 / 0.01)
    assert peaks.gigabytes_per_second == pytest.approx(2 * 0.134217728 / 0.1)


def test_an_interrupt_keeps_the_finished_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str, dtype: str, asked: Asked, tell: Any) -> Row:
        if name == "mlp":
            raise KeyboardInterrupt
        return row(name, dtype)

    monkeypatch.setattr(command, "measure", interrupted)
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(command, "describe_machine", lambda: {
        "cpu": "x", "threads": 1, "load": 0.0, "torch": "2", "amp_ir": "0", "peaks": ""
    })  # fmt: skip
    assert command.main(["bert1", "mlp", "--save", "some"]) == command.INTERRUPTED
    out = capsys.readouterr().out
    assert "interrupted: 2 of 4 rows are finished" in out and "bert1" in out
    document = json.loads((tmp_path / "some.json").read_text())
    assert [one["workload"] for one in document["rows"]] == ["bert1", "bert1"]
    assert document["machine"]["cpu"] == "x"


def test_names_that_are_not_known_are_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(["mlp", "--columns", "speed"])
    assert caught.value.code == 2
    expected = f"'speed' is not a group of columns; expected some of: {', '.join(COLUMNS)}"
    assert capsys.readouterr().err.endswith(f"error: {expected}\n")


def test_channels_last_changes_strides_and_no_number() -> None:
    plain = WORKLOADS["resnet50"].make(small=True)
    other = in_layout(WORKLOADS["resnet50"].make(small=True), "channels_last")
    assert other.batch[0].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(other.batch[0], plain.batch[0])
    weights = [one for one in other.model.parameters() if one.dim() == 4]
    assert all(one.is_contiguous(memory_format=torch.channels_last) for one in weights)
    loss, same = plain.step(*plain.batch), other.step(*other.batch)
    assert float(loss) == pytest.approx(float(same), rel=1e-5)


def test_measured_bytes_are_those_that_a_step_touches() -> None:
    nbytes = 64 << 20
    known = [torch.ones(1 << 20)]

    def step() -> None:
        torch.ones(nbytes, dtype=torch.uint8)

    measured = measured_bytes(step, [*known, known[0]])
    assert abs(measured - (nbytes + (4 << 20))) < 4 << 20


@pytest.mark.parametrize("name", ["dlrm", "smallmlp"])
def test_a_further_workload_trains_as_in_eager(name: str) -> None:
    mine, eager = (ALL[name].make(small=True) for _ in range(2))
    train = amp_ir.jit(mine.step, model=mine.model, optimizer=mine.optimizer)
    for _ in range(3):
        torch.testing.assert_close(train(*mine.batch), eager.step(*eager.batch))
