# SPDX-License-Identifier: Apache-2.0
"""Fuzz for some minutes: `make fuzz MINUTES=30 SEED=1`. The exit code is 1 when a step failed."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from fuzz.grammar import write_program
from fuzz.minimise import minimise
from fuzz.run_program import Outcome
from fuzz.worker import Worker


def main(arguments: list[str] | None = None) -> int:
    """Fuzz, print what failed as stand-alone programs, and count."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--count", type=int, default=10**9, help="programs at most")
    parser.add_argument("--seconds", type=float, default=60.0, help="to make a failure small")
    parser.add_argument("--report", type=Path, help="a file to append failures to")
    parser.add_argument("--unsupported", type=Path, help="a file for unsupported programs")
    chosen = parser.parse_args(arguments)
    end = time.monotonic() + 60 * chosen.minutes
    counts: Counter[str] = Counter()
    seen: Counter[tuple[str, str]] = Counter()
    unsupported: Counter[str] = Counter()
    with Worker() as worker:
        for seed in range(chosen.seed, chosen.seed + chosen.count):
            if time.monotonic() > end:
                break
            program = write_program(seed)
            outcome = worker.run(program)
            counts[outcome.kind] += 1
            if counts.total() % 25 == 0:
                print(f"seed {seed}: {dict(counts)}", flush=True)
            if outcome.kind == "refused":
                unsupported[f"{outcome.key}: {outcome.text[:160]}"] += 1
                _append(chosen.unsupported, f"## seed {seed}: {outcome.key}\n\n{outcome.text}\n\n")
            if not outcome.is_failure:
                continue
            seen[outcome.kind, outcome.key] += 1
            # What differs only in the seed is the same bug again; numbers that are wrong tell
            # nothing of their cause.
            if seen[outcome.kind, outcome.key] > (40 if outcome.kind == "wrong" else 2):
                continue
            small, outcome = minimise(program, outcome, worker.run, seconds=chosen.seconds)
            _tell(seed, small.standalone(), outcome, chosen.report)
    for text, number in unsupported.most_common(40):
        print(f"{number:5} x {text!r}")
    print(", ".join(f"{number} {kind}" for kind, number in counts.most_common()), flush=True)
    return int(any(counts[kind] for kind in ("wrong", "crash", "internal", "timeout")))


def _tell(seed: int, source: str, outcome: Outcome, report: Path | None) -> None:
    text = (
        f"\n## seed {seed}: {outcome.kind} ({outcome.key})\n\n```python\n{source}```\n\n"
        f"```\n{outcome.text.strip()}\n```\n"
    )
    print(text, flush=True)
    _append(report, text)


def _append(path: Path | None, text: str) -> None:
    if path is not None:
        with path.open("a") as file:
            file.write(text)


if __name__ == "__main__":
    sys.exit(main())
