# SPDX-License-Identifier: Apache-2.0
"""Predictions of `amp_ir.advise` beside measured steps: `python -m benchmarks.advise`.

Each workload of the demos is estimated on this CPU, in float32 and in bfloat16, then compiled and
run in turns. The shortest of the runs is compared, since rates are the best of several, too.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import attrs

import amp_ir
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.files.atomic_file import write_text
from benchmarks.record import add_results_option, describe_machine

_WITHIN = 0.2


@attrs.frozen
class Row:
    """One workload: milliseconds a step as estimated and as measured."""

    workload: str
    full_estimated: float
    full_measured: float
    low_estimated: float
    low_measured: float

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
    add_results_option(parser)
    chosen = parser.parse_args(arguments)
    rows = []
    for name in chosen.workloads or WORKLOADS:
        rows.append(measure(name, turns=chosen.turns, small=chosen.small))
        print(shown(rows[-1]), file=sys.stderr, flush=True)
        data = {"machine": describe_machine(), "rows": [attrs.asdict(one) for one in rows]}
        write_text(chosen.results / "advise.json", json.dumps(data, indent=1) + "\n")
        gc.collect()
    print("\n".join(map(shown, rows)))
    within = sum(abs(one.error) <= _WITHIN for one in rows)
    print(f"{within} of {len(rows)} gains are within {_WITHIN:.0%}")
    return 0


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
    return Row(name, found.full_milliseconds, best[0], found.low_milliseconds, best[1])


def _milliseconds(step: Any, batch: tuple[Any, ...]) -> float:
    started = time.perf_counter()
    step(*batch)
    return (time.perf_counter() - started) * 1e3


if __name__ == "__main__":
    sys.exit(main())
