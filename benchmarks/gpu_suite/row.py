# SPDX-License-Identifier: Apache-2.0
"""One row of the suite, in a process of its own: a CUDA error ends no other row."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks.gpu_suite.summary import readme_table, write_row
from benchmarks.gpu_suite.turn import Turn
from benchmarks.on_gpu import PRECISIONS, measure
from benchmarks.workloads.gpu_sized import ON_GPU


def _nothing() -> None:
    pass


def main() -> None:
    """Measure the row on the command line, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=ON_GPU)
    parser.add_argument("precision", choices=PRECISIONS)
    parser.add_argument("path", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--turn", type=Path, help="say here when set up, and wait to be told")
    chosen = parser.parse_args()
    started = time.monotonic()

    def tell(stage: str) -> None:
        print(f"{time.monotonic() - started:5.0f} s  {stage}", flush=True)

    row = measure(
        chosen.workload, chosen.precision, rounds=3 if chosen.small else 7, small=chosen.small,
        tell=tell, device=chosen.device,
        take_turn=_nothing if chosen.turn is None else Turn(chosen.turn).take,
    )  # fmt: skip
    write_row(row, chosen.path)
    print(readme_table([row]))


if __name__ == "__main__":
    main()
