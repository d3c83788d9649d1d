# SPDX-License-Identifier: Apache-2.0
"""What the suite found: outcomes of parts, rows beside PyTorch, and a table for the README."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import attrs

from amp_ir.files.atomic_file import write_text
from benchmarks.on_gpu import OURS, GpuRow


@attrs.frozen
class Outcome:
    """What became of a part: "ok", "failed", "timed out", "not run" or "interrupted"."""

    name: str
    status: str
    detail: str = ""
    seconds: float = 0.0
    last_lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"{self.status:<12}{self.seconds:6.1f} s  {self.name}"
        text = f"{head}: {self.detail}" if self.detail else head
        return "\n    ".join([text, *self.last_lines])


def write_summary(outcomes: Sequence[Outcome], out: Path) -> None:
    """Write `summary.json`, and `summary.txt` with the table of the rows so far."""
    document = {"parts": [attrs.asdict(one) for one in outcomes]}
    write_text(out / "summary.json", json.dumps(document, indent=2) + "\n")
    parts = "\n".join(map(str, outcomes))
    write_text(out / "summary.txt", f"{parts}\n\n{readme_table(rows_in(out))}\n")


def write_row(row: GpuRow, path: Path) -> None:
    """Write a row as JSON."""
    write_text(path, json.dumps(attrs.asdict(row), indent=2) + "\n")


def rows_in(folder: Path) -> list[GpuRow]:
    """Return the rows that lie in a folder, by the names of their files."""
    return [GpuRow(**json.loads(path.read_text())) for path in sorted(folder.glob("row-*.json"))]


def readme_table(rows: Sequence[GpuRow]) -> str:
    """Return the rows as a table in Markdown: milliseconds a step; "-" for what did not run.

    Requires: eager ran in every row; `measure` raises where it does not.
    """
    variants = list(dict.fromkeys([OURS, *(name for row in rows for name in row.milliseconds)]))
    heads = ["", "amp_ir", *variants[1:], "ours / best", "roofline"]
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        times = [_cell(row.milliseconds.get(name)) for name in variants]
        ratio, share = f"{row.ratio:.2f}", f"{row.speed_of_light_share:.0%}"
        lines.append([f"{row.workload} {row.precision}", *times, ratio, share])
    failed = [
        f"- {row.workload} {row.precision}, {name}: {why}"
        for row in rows
        for name, why in row.failed.items()
    ]
    table = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([*table, *(["", "Did not run:", *failed] if failed else [])])


def kernel_lists(row: GpuRow, longest: int = 30) -> str:
    """Return what the GPU did in our step and in PyTorch's fastest, most time first."""
    lines = []
    for variant, kernels in row.kernels.items():
        microseconds = sum(took for _, _, took in kernels)
        lines.append(
            f"{row.workload} {row.precision}, {variant}: {row.milliseconds[variant]:.3g} ms, "
            f"{microseconds / 1e3:.3g} ms of it on the GPU, {len(kernels)} kernels"
        )
        lines.append("  us a step  launches    us each  kernel")
        for name, launches, took in kernels[:longest]:
            lines.append(f"{took:11.1f}{launches:10.1f}{took / launches:11.1f}  {name[:100]}")
    return "\n".join(lines)


def _cell(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.3g}"
