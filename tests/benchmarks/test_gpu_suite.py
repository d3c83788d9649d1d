# SPDX-License-Identifier: Apache-2.0
"""The suite for a GPU: parts hide nothing of each other, end in time, and are saved."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import attrs
from benchmarks.gpu_suite import __main__ as command
from benchmarks.gpu_suite import run_parts as run_parts_module
from benchmarks.gpu_suite.parts import KINDS, Part, SuiteOptions, Together, parts_of
from benchmarks.gpu_suite.run_parts import run_parts
from benchmarks.gpu_suite.summary import kernel_lists, readme_table, rows_in, write_row
from benchmarks.gpu_suite.turn import Turn
from benchmarks.on_gpu import GpuRow


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def gpu_row(workload: str, ours: float, failed: dict[str, str] | None = None) -> GpuRow:
    times = {"ours": ours, "eager": 2.0, "compile": 1.0}
    return GpuRow(workload, "bfloat16", times, {}, 3.0, 10.0, 0, 0.25, None, failed or {})


def test_a_part_that_fails_or_hangs_hides_no_other(tmp_path: Path):
    # The part that hangs has a child, which must end with it.
    sleep = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    child = f"import subprocess, sys; subprocess.run({sleep})"
    parts = [
        Part("fails", python("print('why'); raise SystemExit(3)"), 60),
        Part("cannot-start", (str(tmp_path / "nothing"),), 60),
        Part("hangs", python(child), 1, least_seconds=0),
        Part("works", python("print('fine')"), 60),
    ]
    started = time.monotonic()
    outcomes, was_interrupted = run_parts(parts, tmp_path, seconds=300)
    assert time.monotonic() - started < 60 and not was_interrupted
    assert [one.status for one in outcomes] == ["failed", "failed", "timed out", "ok"]
    assert outcomes[0].detail == "exit code 3" and outcomes[0].last_lines == ("why",)
    assert "cannot be started" in outcomes[1].detail
    assert (tmp_path / "works.log").read_text() == "fine\n"
    saved = json.loads((tmp_path / "summary.json").read_text())
    assert [one["status"] for one in saved["parts"]] == [one.status for one in outcomes]


def test_what_does_not_fit_into_the_time_is_said(tmp_path: Path):
    parts = [Part("long", python(""), 60, least_seconds=100), Part("short", python(""), 60)]
    outcomes, _ = run_parts(parts, tmp_path, seconds=70)
    assert [one.status for one in outcomes] == ["not run", "ok"]
    assert "s were left" in outcomes[0].detail


def test_the_parts_are_in_order_and_the_slowest_rows_are_profiled(tmp_path: Path):
    for name, ours in (("mlp", 0.5), ("bert1", 3.0), ("lstm", 2.0)):
        write_row(gpu_row(name, ours), tmp_path / f"row-{name}-bfloat16.json")
    options = SuiteOptions(
        out=tmp_path,
        workloads=("mlp", "bert1"),
        precisions=("bfloat16", "float16"),
        is_rehearsal=False,
        profiles=2,
    )
    yielded = list(parts_of(options))
    parts = [one for part in yielded for one in (getattr(part, "parts", (part,)))]
    names = [part.name for part in parts if part.name != "sanitizer"]
    assert names == [
        *("machine", "build", "smoke", "tests", "row-mlp-bfloat16", "row-bert1-bfloat16"),
        *("row-mlp-float16", "row-bert1-float16", "profile-bert1-bfloat16"),
        "profile-lstm-bfloat16",
    ]
    assert {name.partition("-")[0] for name in names} <= set(KINDS)
    assert all("cuda" in part.command for part in parts if "profile" in part.name)
    (beside,) = [part for part in yielded if isinstance(part, Together)]
    assert [one.name for one in beside.parts if one.turn is None][0] == "tests"
    assert sum(one.turn is not None for one in beside.parts) == 4


def turning(turn: Turn, busy: Path, *, seconds: float = 0.0) -> tuple[str, ...]:
    """A command that sets up for `seconds`, and in its turn fails where another is in its own."""
    return python(
        "import sys, time; from pathlib import Path\n"
        "from benchmarks.gpu_suite.turn import Turn\n"
        f"time.sleep({seconds}); Turn(Path({str(turn.path)!r})).take()\n"
        f"busy = Path({str(busy)!r}); busy.mkdir(); time.sleep(0.2); busy.rmdir(); print('fine')"
    )


def test_rows_set_up_side_by_side_and_take_turns(tmp_path: Path):
    turns = [Turn(tmp_path / str(k)) for k in range(3)]
    rows = [
        Part(f"row-{k}", turning(turn, tmp_path / "busy"), 60, turn=turn)
        for k, turn in enumerate(turns)
    ]
    fails = Part("tests", python("raise SystemExit(2)"), 60)
    outcomes, _ = run_parts([Together((fails, *rows))], tmp_path, seconds=300)
    found = {one.name: one.status for one in outcomes}
    assert found == {"tests": "failed", "row-0": "ok", "row-1": "ok", "row-2": "ok"}


def test_a_row_that_is_not_ready_in_time_does_not_keep_others_from_their_turn(tmp_path: Path):
    turns = [Turn(tmp_path / str(k)) for k in range(2)]
    # Nothing is left for the slow one but to be ended.
    seconds = 2 * run_parts_module._TURN_SECONDS + run_parts_module._RESERVED_SECONDS + 1
    rows = [
        Part("row-slow", turning(turns[0], tmp_path / "busy", seconds=600), 600, 0, turns[0]),
        Part("row-fast", turning(turns[1], tmp_path / "busy"), 600, 0, turns[1]),
    ]
    outcomes, _ = run_parts([Together(tuple(rows))], tmp_path, seconds=seconds)
    assert [(one.name, one.status) for one in outcomes] == [
        ("row-fast", "ok"),
        ("row-slow", "timed out"),
    ]
    assert outcomes[0].seconds < outcomes[1].seconds


def test_the_table_has_what_ran_and_says_what_did_not():
    rows = [gpu_row("mlp", 0.5), gpu_row("ssd", 4.0, {"graph by hand": "capture failed"})]
    assert readme_table(rows).splitlines() == [
        "|  | amp_ir | eager | compile | ours / best | roofline |",
        "| --- | --- | --- | --- | --- | --- |",
        "| mlp bfloat16 | 0.5 | 2 | 1 | 0.50 | 50% |",
        "| ssd bfloat16 | 4 | 2 | 1 | 4.00 | 6% |",
        "",
        "Did not run:",
        "- ssd bfloat16, graph by hand: capture failed",
    ]


def test_the_kernels_of_a_row_are_listed_by_time(tmp_path: Path):
    kernels = {"ours": [("kernel_7", 12.0, 600.0), ("gemm", 1.0, 90.5)], "compile": []}
    write_row(attrs.evolve(gpu_row("mlp", 0.75), kernels=kernels), tmp_path / "row-mlp.json")
    assert kernel_lists(*rows_in(tmp_path)).splitlines() == [
        "mlp bfloat16, ours: 0.75 ms, 0.691 ms of it on the GPU, 2 kernels",
        "  us a step  launches    us each  kernel",
        "      600.0      12.0       50.0  kernel_7",
        "       90.5       1.0       90.5  gemm",
        "mlp bfloat16, compile: 1 ms, 0 ms of it on the GPU, 0 kernels",
        "  us a step  launches    us each  kernel",
    ]


def test_a_rehearsal_runs_the_same_command_without_a_gpu(tmp_path: Path):
    parts = ["--parts", "machine", "smoke", "row", "profile"]
    arguments = ["mlp", "--rehearse", "--precisions", "bfloat16", "--profiles", "1", *parts]
    assert command.main([*arguments, "--out", str(tmp_path), "--minutes", "30"]) == 0
    found = {path.name for path in tmp_path.iterdir()}
    assert {
        *("machine.json", "smoke.log", "row-mlp-bfloat16.json", "profile-mlp-bfloat16.json"),
        *("profile-mlp-bfloat16-trace.json", "summary.json", "summary.txt"),
    } <= found
    assert "| mlp bfloat16 |" in (tmp_path / "summary.txt").read_text()
