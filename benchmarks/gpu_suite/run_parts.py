# SPDX-License-Identifier: Apache-2.0
"""Runs parts one after the other in a budget of time; what happens to one hides no other."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.gpu_suite.parts import ROOT, Part
from benchmarks.gpu_suite.summary import Outcome, write_summary

# To write the last summary, and for the machine to be left in order.
_RESERVED_SECONDS = 10.0
# From the request to end to the end.
_GRACE_SECONDS = 5.0
_SHOWN_LINES = 15


def run_parts(parts: Iterable[Part], out: Path, *, seconds: float) -> tuple[list[Outcome], bool]:
    """Run what fits into `seconds`; return what became of each part, and if it was interrupted.

    The output of a part goes to a file of its name in `out`; its last lines are printed where it
    failed. The summary in `out` is written again after each part.
    """
    deadline = time.monotonic() + seconds - _RESERVED_SECONDS
    outcomes: list[Outcome] = []
    for part in parts:
        left = deadline - time.monotonic()
        if left < part.least_seconds:
            outcomes.append(Outcome(part.name, "not run", f"{max(left, 0):.0f} s were left"))
        else:
            outcomes.append(_run(part, out, min(left, part.limit_seconds)))
        print(outcomes[-1], flush=True)
        write_summary(outcomes, out)
        if outcomes[-1].status == "interrupted":
            return outcomes, True
    return outcomes, False


def _run(part: Part, out: Path, limit_seconds: float) -> Outcome:
    log = out / f"{part.name}.log"
    # Results lie beside the code that is measured, whatever folder the suite was called from.
    paths = [str(ROOT / "python"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment["PYTHONUNBUFFERED"] = "1"
    started = time.monotonic()
    with log.open("w") as file:
        try:
            process = subprocess.Popen(
                part.command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return Outcome(part.name, "failed", f"it cannot be started: {error}")
        try:
            code = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            _end(process)
            status, detail = "timed out", f"after {limit_seconds:.0f} s"
        except KeyboardInterrupt:
            _end(process)
            status, detail = "interrupted", ""
        else:
            status, detail = ("ok", "") if code == 0 else ("failed", f"exit code {code}")
    lines = log.read_text(errors="replace").rstrip().splitlines()
    shown = lines[-1:] if status == "ok" else lines[-_SHOWN_LINES:]
    return Outcome(part.name, status, detail, time.monotonic() - started, tuple(shown))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part with everything that it started."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            break
