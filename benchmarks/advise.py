# SPDX-License-Identifier: Apache-2.0
"""Predictions of `amp_ir.advise` beside measured steps: `python -m benchmarks.advise`.

Each workload of the demos is estimated on this CPU, in float32 and in bfloat16, then compiled and
run in turns. The shortest of the runs is compared, since rates are the best of several, too.
Rows are kept in advise.json of --results; --table shows them without measuring, --write writes the
section of docs/profiling.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

import amp_ir
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.files.atomic_file import write_text
from amp_ir.vm.build import host_description
from benchmarks.chosen_names import check_names
from benchmarks.page_section import with_section
from benchmarks.record import add_results_option, describe_machine

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "profiling.md"
HEADING = "## Predictions beside measured steps\n"
_WITHIN = 0.2


@attrs.frozen
class Row:
    """One workload: milliseconds a step as estimated and as measured."""

    workload: str
    full_estimated: float
    full_measured: float
    low_estimated: float
    low_measured: float
    machine: str = ""
    is_small: bool = False

    @property
    def gain_estimated(self) -> float:
        """How many times as fast bfloat16 is expected to be."""
        return self.full_estimated / self.low_estimated

    @property
    def gain_measured(self) -> float:
        """How many times as fast it is."""
        return self.full_measured / self.low_measured

    @property
    def error(self) -> float:
        """By how much the estimated gain is off."""
        return self.gain_estimated / self.gain_measured - 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurements on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.advise", description=__doc__)
    parser.add_argument("workloads", nargs="*", default=[], help=", ".join(WORKLOADS))
    parser.add_argument("--turns", type=int, default=5, help="timed steps of each")
    parser.add_argument("--small", action="store_true", help="shapes of a test")
    parser.add_argument("--table", action="store_true", help="show the rows, measure nothing")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    add_results_option(parser)
    chosen = parser.parse_args(arguments)
    check_names(parser, chosen.workloads, WORKLOADS, "workload")
    file = chosen.results / "advise.json"
    rows = read_rows(file)
    for name in () if chosen.table else chosen.workloads or WORKLOADS:
        rows[name] = measure(name, turns=chosen.turns, small=chosen.small)
        print(shown(rows[name]), file=sys.stderr, flush=True)
        data = {"machine": describe_machine(), "rows": [*map(attrs.asdict, rows.values())]}
        write_text(file, json.dumps(data, indent=1) + "\n")
        gc.collect()
    ordered = [rows[name] for name in WORKLOADS if name in rows]
    print("\n".join(map(shown, ordered)))
    print(summary(ordered))
    if chosen.write:
        page = PAGE.read_text(encoding="utf-8")
        write_text(PAGE, with_section(page, HEADING, table(ordered)))
    return 0


def read_rows(file: Path) -> dict[str, Row]:
    """Return the rows that a file holds, by workload."""
    if not file.exists():
        return {}
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return {one["workload"]: Row(**one) for one in rows}


def summary(rows: Sequence[Row]) -> str:
    """Return how many gains are predicted well."""
    within = sum(abs(one.error) <= _WITHIN for one in rows)
    return f"{within} of {len(rows)} gains are within {_WITHIN:.0%}"


def table(rows: Sequence[Row]) -> str:
    """Return the section of the page."""
    machines = "; ".join(dict.fromkeys(one.machine for one in rows))
    lines = [
        HEADING,
        "`python -m benchmarks.advise --write` makes this section: milliseconds a step as "
        "estimated and as measured, the shortest of some steps in turns, and the gain of",
        f"bfloat16. {summary(rows)}. Measured on {machines}.",
        "",
        "| | float32 estimated | measured | off | bfloat16 estimated | measured | off "
        "| gain estimated | measured | off |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        full = one.full_estimated / one.full_measured - 1.0
        low = one.low_estimated / one.low_measured - 1.0
        lines.append(
            f"| {one.workload}{' (small)' if one.is_small else ''} | {one.full_estimated:.3g} | "
            f"{one.full_measured:.3g} | {full:+.0%} | {one.low_estimated:.3g} | "
            f"{one.low_measured:.3g} | {low:+.0%} | {one.gain_estimated:.2f} | "
            f"{one.gain_measured:.2f} | {one.error:+.0%} |"
        )
    return "\n".join(lines) + "\n"


def shown(row: Row) -> str:
    """Return a row as text."""
    return (
        f"{row.workload:<9} float32 {row.full_estimated:8.1f} / {row.full_measured:8.1f} ms, "
        f"bfloat16 {row.low_estimated:8.1f} / {row.low_measured:8.1f} ms, "
        f"gain {row.gain_estimated:.2f} / {row.gain_measured:.2f} ({row.error:+.0%})"
    )


def measure(name: str, *, turns: int, small: bool) -> Row:
    """Estimate a workload, then compile it in both dtypes and run them in turns."""
    training = WORKLOADS[name].make(small=small)
    mod, args = amp_ir.trace_step(
        training.step, training.batch, model=training.model, optimizer=training.optimizer
    )
    found = amp_ir.advise(mod, args)
    steps = [amp_ir.compile(mod), amp_ir.compile(amp_ir.autocast(mod, args, amp_dtype="bfloat16"))]
    best = [float("inf")] * len(steps)
    for turn in range(1 + turns):
        for k, step in enumerate(steps):
            spent = _milliseconds(step, training.batch)
            if turn:
                best[k] = min(best[k], spent)
    where = f"{host_description()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    return Row(
        name, found.full_milliseconds, best[0], found.low_milliseconds, best[1], where, small
    )


def _milliseconds(step: Any, batch: tuple[Any, ...]) -> float:
    started = time.perf_counter()
    step(*batch)
    return (time.perf_counter() - started) * 1e3


if __name__ == "__main__":
    sys.exit(main())
