# SPDX-License-Identifier: Apache-2.0
"""Run the coverage list: `python -m benchmarks.programs [NAME ...] [--write]`.

Each program trains three steps in float32 and in bfloat16, beside eager PyTorch and its autocast,
and is compared with eager PyTorch in float64. Rows go to build/programs.jsonl as they come; what is
there is not run again, unless --again says so. --write makes docs/coverage.md of them.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch
from rich.console import Console

from amp_ir.files.atomic_file import write_text
from amp_ir.vm.build import host_description
from benchmarks.programs.measure import DTYPES, FAILED, RIGHT, Row
from benchmarks.programs.table import page

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "build" / "programs.jsonl"
PAGE = ROOT / "docs" / "coverage.md"
_SECONDS = 240


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the number of programs that are not right."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.programs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help="parts of names or kinds; all by default")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="one dtype only")
    parser.add_argument("--again", action="store_true", help="also what has a row")
    parser.add_argument(
        "--failed", action="store_true", help="also what has a row that is not right"
    )
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--rows", type=Path, default=ROWS, metavar="FILE", help="the rows")
    parser.add_argument("--limit", type=int, default=_SECONDS, metavar="S", help="seconds for each")
    chosen = parser.parse_args(arguments)
    rows = read_rows(chosen.rows)
    wanted = [
        (name, dtype)
        for name in _names(chosen.names)
        for dtype in chosen.dtype or DTYPES
        if chosen.again
        or (name, dtype) not in rows
        or (chosen.failed and rows[name, dtype].status != RIGHT)
    ]
    run(wanted, chosen.rows, chosen.limit)
    rows = read_rows(chosen.rows)
    if chosen.write:
        machine = f"{host_description()}, one thread, torch {torch.__version__}"
        listed = [rows[key] for name in _names([]) for key in _keys(name) if key in rows]
        write_text(PAGE, page(listed, machine))
    return 0


def _keys(name: str) -> list[tuple[str, str]]:
    return [(name, dtype) for dtype in DTYPES]


def _names(parts: Sequence[str]) -> list[str]:
    from benchmarks.programs.listed import PROGRAMS  # noqa: PLC0415 - takes seconds

    return [
        name
        for name, program in PROGRAMS.items()
        if not parts or any(one in name or one in program.kind for one in parts)
    ]


def read_rows(file: Path) -> dict[tuple[str, str], Row]:
    """Return the rows of a file; a later one of the same program and dtype counts."""
    if not file.exists():
        return {}
    found = [Row(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    return {(one.name, one.dtype): one for one in found}


def run(wanted: Sequence[tuple[str, str]], file: Path, seconds: int) -> None:
    """Measure each program, in processes that end when one takes too long."""
    file.parent.mkdir(parents=True, exist_ok=True)
    console, worker = Console(stderr=True), None
    for number, (name, dtype) in enumerate(wanted, 1):
        worker = worker or Worker()
        row = worker.measure(name, dtype, seconds)
        if row is None:
            worker = None
            row = Row(
                name, "", dtype, FAILED, note=f"not done within {seconds} s, or the process died"
            )
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        write_text(file, before + json.dumps(attrs.asdict(row)) + "\n")
        console.print(
            f"{number}/{len(wanted)} {name}, {dtype}: {row.status} {row.note[:150]}",
            highlight=False,
            markup=False,
        )
    if worker is not None:
        worker.end()


class Worker:
    """A process that measures one program after the other."""

    def __init__(self) -> None:
        paths = [str(ROOT / "python"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "AMP_IR_CACHE": "off", "PYTHONPATH": os.pathsep.join(paths)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.programs.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        if self._line(180) is None:
            raise RuntimeError("the process that measures did not start")

    def measure(self, name: str, dtype: str, seconds: float) -> Row | None:
        """Return the row of a program; None where the process was ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name} {dtype}\n")
        self._process.stdin.flush()
        line = self._line(seconds)
        return None if line is None else Row(**json.loads(line))

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _line(self, seconds: float) -> str | None:
        stdout, until = self._process.stdout, time.monotonic() + seconds
        assert stdout is not None
        while time.monotonic() < until:
            if select.select([stdout], [], [], 1.0)[0]:
                return stdout.readline() or self._ended()
        return self._ended()

    def _ended(self) -> None:
        self.end()


if __name__ == "__main__":
    sys.exit(main())
