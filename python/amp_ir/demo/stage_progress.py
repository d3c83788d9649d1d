# SPDX-License-Identifier: Apache-2.0
"""Progress of a command on stderr: the current stage, and how long each stage took."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from amp_ir.demo.comparison import Report


@contextlib.contextmanager
def stages() -> Iterator[Report]:
    """Show the current stage: a live line on a terminal, else a line per stage.

    Writes to stderr, so that a pipe receives the table alone.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _a_line_a_stage()
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)
        yield lambda stage, part="": progress.update(task, description=f"{stage} {part}")


def _a_line_a_stage() -> Report:
    shown: list[str] = []

    def report(stage: str, part: str = "") -> None:
        if stage not in shown[-1:]:
            shown.append(stage)
            print(stage, file=sys.stderr, flush=True)

    return report


@contextlib.contextmanager
def spent(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the seconds of a stage to `seconds`."""
    started = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - started
