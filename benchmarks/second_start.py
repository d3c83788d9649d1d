# SPDX-License-Identifier: Apache-2.0
"""A second start of a script, from the compile cache: `python -m benchmarks.second_start [NAME]`.

Seconds from `trace_step`, after all imports, to a step that is ready to run, and to the end of the
first step, with an empty cache, with one that an earlier process filled, and with one that has
kernels alone, as after an edit that moves lines. Each start has its own process; the kinds take
turns, so that load on the machine falls on all. Processor's seconds are of the capture, autocast
and compilation alone. The last rows are divided by those of an empty cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import amp_ir
from amp_ir.demo.workloads import WORKLOADS
from benchmarks.chosen_names import check_names

NAMES = ("bert1", "gpt2")
DTYPES = ("float32", "bfloat16")
EDITED = "after an edit"
FIELDS = ("ready", "processor", "compile", "first step")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the measurements on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.second_start", description=__doc__)
    parser.add_argument("names", nargs="*", default=[], help=", ".join(WORKLOADS))
    parser.add_argument("--small", action="store_true", help="shapes of a test")
    parser.add_argument("--rounds", type=int, default=5, help="starts of each kind")
    parser.add_argument("--measure", metavar="DTYPE", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    check_names(parser, chosen.names, WORKLOADS, "workload")
    names = chosen.names or list(NAMES)
    if chosen.measure:
        print(json.dumps(measure(names[0], chosen.measure, small=chosen.small)))
        return
    print(f"{'':16}{'':16}" + "".join(f"{one:>12}" for one in FIELDS))
    for name in names:
        for dtype in DTYPES:
            for kind, row in compare(name, dtype, small=chosen.small, rounds=chosen.rounds).items():
                numbers = "".join(f"{row[one]:12.3f}" for one in FIELDS)
                print(f"{name:6}{dtype:10}{kind:16}{numbers}", flush=True)


def measure(name: str, dtype: str, *, small: bool) -> dict[str, float]:
    """Return the seconds of one start in this process."""
    training = WORKLOADS[name].make(small=small)
    _ = amp_ir.trace_step  # PyTorch and TVM are imported when a name is first used
    started, processor = time.perf_counter(), time.process_time()
    mod, args = amp_ir.trace_step(
        training.step, training.batch, model=training.model, optimizer=training.optimizer
    )
    if dtype != "float32":
        mod = amp_ir.autocast(mod, args, amp_dtype=dtype)
    captured = time.perf_counter()
    train = amp_ir.compile(mod)
    ready, processor = time.perf_counter(), time.process_time() - processor
    train(*training.batch)
    found = (ready - started, processor, ready - captured, time.perf_counter() - started)
    row = dict(zip(FIELDS, found, strict=True))
    return {**row, "loaded": float("cache" in train.report.seconds)}


def compare(name: str, dtype: str, *, small: bool, rounds: int) -> dict[str, dict[str, float]]:
    """Return the medians of each kind of start, and the quotients of all but the first."""
    rows: dict[str, list[dict[str, float]]] = {"empty cache": [], "second start": [], EDITED: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            cache = Path(folder, str(number))
            for kind, found in rows.items():
                if kind == EDITED:
                    forget_steps(cache)
                found.append(_in_a_process(name, dtype, cache, small=small))
                assert found[-1]["loaded"] == (kind == "second start")
    medians = {
        kind: {one: statistics.median(row[one] for row in found) for one in FIELDS}
        for kind, found in rows.items()
    }
    cold, *others = medians.items()
    for kind, row in others:
        medians[f"{kind} /"] = {one: row[one] / cold[1][one] for one in FIELDS}
    return medians


def forget_steps(cache: Path) -> None:
    """Leave kernels alone in a cache: what a script finds whose lines have moved."""
    for path in cache.iterdir():
        if path.is_file():
            path.unlink()


def _in_a_process(name: str, dtype: str, cache: Path, *, small: bool) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.second_start", name, "--measure", dtype]
    done = subprocess.run(
        command + ["--small"] * small,
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "AMP_IR_CACHE": str(cache)},
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
