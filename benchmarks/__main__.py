# SPDX-License-Identifier: Apache-2.0
"""Training steps beside PyTorch, in milliseconds: `python -m benchmarks [WORKLOAD ...]`.

For each workload and dtype our compiled step, PyTorch eager and torch.compile run in turns in one
process, so that a change of the machine's speed affects all of them. Convolutional networks of
PyTorch's run in channels_last as well, and the faster layout counts. The command prints one table.
It saves the table after each row, with a description of the machine, under benchmarks/results/; an
interrupt (^C) keeps the finished rows. `--columns` selects the columns; all of them take minutes
per row, most of which torch.compile spends compiling.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from amp_ir.demo.workloads import WORKLOADS
from amp_ir.errors import DeviceError
from amp_ir.files.atomic_file import write_text
from amp_ir.ir.target import target_of
from amp_ir.report.wide_console import wide_console
from benchmarks import on_gpu
from benchmarks.record import RESULTS, describe_machine
from benchmarks.step_row import COLUMNS, Asked, Row, measure
from benchmarks.step_table import footnotes, table_of
from benchmarks.workloads.further import ALL, FURTHER
from benchmarks.workloads.gpu_sized import ON_GPU

DTYPES = ("float32", "bfloat16")
DEFAULT_COLUMNS = tuple(name for name in COLUMNS if name != "layouts")
INTERRUPTED = 130
# The width of a table that goes to a file; a terminal uses its own.
_FILE_COLUMNS = 140


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurements on the command line; return the exit code."""
    chosen = _parser().parse_args(arguments)
    if chosen.device == "cuda":
        return _on_gpu(chosen)
    chosen.dtypes = chosen.dtypes or list(DTYPES)
    _check_names(chosen)
    names = chosen.workloads or (ALL if chosen.all else WORKLOADS)
    cases = [(name, dtype) for name in names for dtype in chosen.dtypes]
    asked = Asked(frozenset(chosen.columns), chosen.rounds, chosen.draws, chosen.small)
    path = None if chosen.save is None else RESULTS / f"{chosen.save}.json"
    rows: list[Row] = []
    code = 0
    with _progress(len(cases)) as advance:
        try:
            for name, dtype in cases:
                rows.append(measure(name, dtype, asked, advance(f"{name} {dtype}")))
                if path is not None:
                    save(rows, path)  # at once: the rest may take minutes
        except KeyboardInterrupt:
            code = INTERRUPTED
    show(rows)
    if code:
        print(f"interrupted: {len(rows)} of {len(cases)} rows are finished")
    if path is not None and rows:
        print(f"saved as {path}")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="columns:\n" + "\n".join(f"  {name:<9} {what}" for name, what in COLUMNS.items()),
    )
    names = f"default {', '.join(WORKLOADS)}; more: {', '.join(FURTHER)}"
    parser.add_argument("workloads", nargs="*", default=[], help=names)
    parser.add_argument("--all", action="store_true", help="all workloads")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                        help="cuda: a table of its own, see benchmarks/on_gpu.py")  # fmt: skip
    usual = f"default {' '.join(DTYPES)}; cuda: {' '.join(on_gpu.PRECISIONS)}"
    parser.add_argument("--dtypes", nargs="+", default=[], metavar="DTYPE", help=usual)
    parser.add_argument("--columns", nargs="*", default=list(DEFAULT_COLUMNS), metavar="GROUP",
                        help=f"besides times; default {' '.join(DEFAULT_COLUMNS)}")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7, help="turns of each variant")
    parser.add_argument("--draws", type=int, default=5, help="of weights, for the gradient error")
    parser.add_argument("--small", action="store_true", help="shapes of a test")
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    return parser


def _on_gpu(chosen: argparse.Namespace) -> int:
    """Measure the table of a GPU; an interrupt keeps the finished rows."""
    try:
        target_of("cuda")
    except DeviceError as error:
        _parser().error(str(error))
    names = chosen.workloads or list(ALL if chosen.all else WORKLOADS)
    precisions = chosen.dtypes or on_gpu.PRECISIONS
    chosen.columns = []
    _check(names, ON_GPU, "workload")
    _check(precisions, on_gpu.PRECISIONS, "precision")
    rows: list[on_gpu.GpuRow] = []
    code = 0
    with _progress(len(names) * len(precisions)) as advance:
        try:
            for name in names:
                for precision in precisions:
                    tell = advance(f"{name} {precision}")
                    row = on_gpu.measure(
                        name, precision, rounds=chosen.rounds, small=chosen.small, tell=tell
                    )
                    rows.append(row)
                    if chosen.save is not None:
                        on_gpu.save(rows, RESULTS / f"{chosen.save}.json")
        except KeyboardInterrupt:
            code = INTERRUPTED
    console = wide_console(_FILE_COLUMNS)
    console.print(on_gpu.table_of(rows))
    console.print(", ".join(f"{key} {value}" for key, value in on_gpu.describe_gpu().items()))
    return code


def _check_names(chosen: argparse.Namespace) -> None:
    """Raise on an unknown name before anything is measured."""
    for given, known, what in (
        (chosen.workloads, ALL, "workload"),
        (chosen.columns, COLUMNS, "group of columns"),
        (chosen.dtypes, (*DTYPES, "float16"), "dtype"),
    ):
        _check(given, known, what)


def _check(given: Sequence[str], known: Iterable[str], what: str) -> None:
    for name in given:
        if name not in known:
            expected = ", ".join(known)
            _parser().error(f"{name!r} is not a {what}; expected some of: {expected}")


def show(rows: Sequence[Row]) -> None:
    """Print the table, what its columns mean, and the machine."""
    console = wide_console(_FILE_COLUMNS)
    if not rows:
        return
    console.print(table_of(rows, console.width))
    console.print()
    for line in footnotes(rows):
        console.print(line, style="dim", highlight=False)
    machine = describe_machine()
    console.print(
        f"{machine['cpu']}, {machine['threads']} threads, load {machine['load']:.1f}; torch "
        f"{machine['torch']}, amp_ir {machine['amp_ir']}; peaks {machine['peaks']}",
        style="dim",
        highlight=False,
    )


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], Callable[[str], None]]]:
    """Return a function that begins a row and returns one that receives its stages.

    It shows a bar on a terminal, else a line per stage; on stderr, so that the table can be piped.
    """
    console = Console(stderr=True)
    started = time.monotonic()
    columns = (
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        begun: list[str] = []

        def row(name: str) -> Callable[[str], None]:
            progress.update(task, completed=len(begun))
            begun.append(name)

            def tell(stage: str) -> None:
                progress.update(task, description=f"{name}: {stage}")
                if not console.is_terminal:
                    seconds = time.monotonic() - started
                    console.print(f"{seconds:5.0f} s  {name}: {stage}", highlight=False)

            return tell

        yield row


def save(rows: Sequence[Row], path: Path) -> None:
    """Write the rows and the machine's description as JSON."""
    path.parent.mkdir(exist_ok=True)
    document = {"machine": describe_machine(), "rows": [attrs.asdict(row) for row in rows]}
    write_text(path, json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
