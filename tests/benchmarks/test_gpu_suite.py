# SPDX-License-Identifier: Apache-2.0
"""The suite for a GPU: parts hide nothing of each other, end in time, and are saved."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from benchmarks.gpu_suite import __main__ as command
from benchmarks.gpu_suite.parts import KINDS, Part, SuiteOptions, parts_of
from benchmarks.gpu_suite.run_parts import run_parts
from benchmarks.gpu_suite.summary import readme_table, write_row
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
    names = [part.name for part in parts_of(options) if part.name != "sanitizer"]
    assert names == [
        *("machine", "build", "smoke", "tests", "row-mlp-bfloat16", "row-bert1-bfloat16"),
        *("row-mlp-float16", "row-bert1-float16", "profile-bert1-bfloat16"),
        "profile-lstm-bfloat16",
    ]
    assert {name.partition("-")[0] for name in names} <= set(KINDS)
    assert all("cuda" in part.command for part in parts_of(options) if "profile" in part.name)


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
