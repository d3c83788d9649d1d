# SPDX-License-Identifier: Apache-2.0
"""Times training steps beside PyTorch: `python -m benchmarks [WORKLOAD ...]`.

For each workload and dtype, our compiled step, PyTorch eager and (with --compile) torch.compile run
in turns in one process, so that a change of the machine's speed meets all of them. Printed are
medians of a step, ratios, the seconds of the first step (capture, compile and run), and our planned
peak. The table is saved with a description of the machine under benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import amp_ir
from amp_ir.build import host_description
from amp_ir.demo.workloads import WORKLOADS, Training

RESULTS = Path(__file__).parent / "results"
Step = Callable[[], Any]


@attrs.frozen
class Row:
    """One workload in one dtype; milliseconds are medians of a step."""

    workload: str
    dtype: str
    ours_milliseconds: float
    eager_milliseconds: float
    compile_milliseconds: float | None
    ours_first_seconds: float
    compile_first_seconds: float | None
    planned_peak_mib: float
    kernels: int
    losses: tuple[float, float]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the measurements that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("workloads", nargs="*", default=[], help=", ".join(WORKLOADS))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=7, help="steps of each variant, in turns")
    parser.add_argument("--compile", action="store_true", help="torch.compile as well")
    parser.add_argument("--small", action="store_true", help="shapes of a test")
    parser.add_argument("--save", metavar="NAME", help="file under benchmarks/results/")
    options = parser.parse_args(arguments)
    cases = [(name, dtype) for name in options.workloads or WORKLOADS for dtype in options.dtypes]
    console = Console(stderr=True)
    rows = [
        measure(name, dtype, options)
        for name, dtype in track(cases, description="measuring", console=console)
    ]
    Console(width=max(Console().width, 120)).print(table_of(rows))
    if options.save:
        save(rows, RESULTS / f"{options.save}.json")


def measure(name: str, dtype: str, options: argparse.Namespace) -> Row:
    """Time one workload in one dtype."""
    make = WORKLOADS[name].make
    ours, eager = make(small=options.small), make(small=options.small)
    started = time.perf_counter()
    mod, args = amp_ir.trace_step(ours.step, ours.batch, model=ours.model, optimizer=ours.optimizer)
    if dtype != "float32":
        mod = amp_ir.autocast(mod, args, amp_dtype=dtype)
    train = amp_ir.compile(mod)
    first = train(*ours.batch)
    ours_first = time.perf_counter() - started
    variants: dict[str, Step] = {
        "ours": lambda: train(*ours.batch),
        "eager": peer_step(eager, dtype),
    }
    compile_first = None
    if options.compile:
        compiled = make(small=options.small)
        step = torch.compile(peer_step(compiled, dtype))
        started = time.perf_counter()
        step()
        compile_first = time.perf_counter() - started
        variants["compile"] = step
    expected = variants["eager"]()
    medians = in_turns(variants, options.rounds)
    return Row(
        workload=name,
        dtype=dtype,
        ours_milliseconds=medians["ours"],
        eager_milliseconds=medians["eager"],
        compile_milliseconds=medians.get("compile"),
        ours_first_seconds=ours_first,
        compile_first_seconds=compile_first,
        planned_peak_mib=train.report.plan.peak_bytes / 2**20,
        kernels=train.report.kernel_count,
        losses=(float(first), float(expected)),
    )


def peer_step(training: Training, dtype: str) -> Step:
    """PyTorch's step: plain in float32, under torch.autocast otherwise."""
    if dtype == "float32":
        return lambda: training.step(*training.batch)
    low = getattr(torch, dtype)
    return lambda: training.autocast_step(*training.batch, dtype=low)


def in_turns(variants: dict[str, Step], rounds: int) -> dict[str, float]:
    """Median milliseconds of each variant; one warm-up round, then `rounds`, one after another."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(rounds + 1):
        for name, step in variants.items():
            started = time.perf_counter()
            step()
            if round_:
                times[name].append((time.perf_counter() - started) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def table_of(rows: Sequence[Row]) -> Table:
    """The rows for people."""
    table = Table(title=f"ms a training step, medians in turns ({host_description()})")
    for heading in ("workload", "dtype", "amp_ir", "eager", "compile", "ratio to best", "AMP gain",
                    "first step s", "compile's s", "planned peak MiB"):  # fmt: skip
        table.add_column(heading, justify="left" if heading in ("workload", "dtype") else "right")
    full = {row.workload: row.ours_milliseconds for row in rows if row.dtype == "float32"}
    for row in rows:
        peers = [row.eager_milliseconds, row.compile_milliseconds or float("inf")]
        gain = full.get(row.workload, 0.0) / row.ours_milliseconds
        table.add_row(
            row.workload,
            row.dtype,
            f"{row.ours_milliseconds:.1f}",
            f"{row.eager_milliseconds:.1f}",
            _number(row.compile_milliseconds, 1),
            f"{row.ours_milliseconds / min(peers):.2f}",
            "" if row.dtype == "float32" or not gain else f"{gain:.2f} x",
            f"{row.ours_first_seconds:.1f}",
            _number(row.compile_first_seconds, 1),
            f"{row.planned_peak_mib:.0f}",
        )
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def machine() -> dict[str, Any]:
    """What the numbers were taken on."""
    return {
        "cpu": host_description(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "torch": torch.__version__,
        "amp_ir": amp_ir.__version__,
    }


def save(rows: Sequence[Row], path: Path) -> None:
    """Write the rows and the machine's description as JSON."""
    path.parent.mkdir(exist_ok=True)
    document = {"machine": machine(), "rows": [attrs.asdict(row) for row in rows]}
    path.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
