# SPDX-License-Identifier: Apache-2.0
"""Tells on stderr what a command is at work on, and how long each stage takes."""

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
    """Name the stage that is at work: a live line on a terminal, else a line a stage.

    Goes to stderr, so that what is piped on is the table alone.
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
    told: list[str] = []

    def report(stage: str, part: str = "") -> None:
        if stage not in told[-1:]:
            told.append(stage)
            print(stage, file=sys.stderr, flush=True)

    return report


@contextlib.contextmanager
def spent(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Put into `seconds` how long a stage took."""
    started = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - started
