# SPDX-License-Identifier: Apache-2.0
"""Build, test, measure and profile on a GPU: `python -m benchmarks.gpu_suite --out DIR`.

Each part is a process of its own with a limit of time, and hides nothing of the others. First, one
after the other:

    machine    the GPU, its driver, the versions
    build      the native libraries, in place
    smoke      one small step beside PyTorch's eager one: does anything run at all

Then, side by side:

    tests      `pytest -m gpu`, which goes on after failures
    sanitizer  the smoke step under compute-sanitizer, where that is installed
    row        each workload in each precision beside eager, torch.compile, reduce-overhead and a
               hand-captured CUDA graph of the eager step; all workloads in bfloat16 first. Rows
               compile side by side, and each is measured alone on the machine: when all are set up,
               or when no more time is left than the measurements take

And last:

    profile    `amp-ir profile` of the demos' rows that lose most to PyTorch

Every result is in DIR as it comes: a log for each part, a JSON file for each row and profile, and
`summary.json`, which is written again after each part. `--parts` runs some of them, where a
command may only take so long. `--rehearse` runs the same on a machine
without a GPU: small shapes on the CPU, and tests in the emulator. `--table DIR` prints the rows
that lie in DIR as a table for the README, `--kernels DIR` the kernels of our step and of PyTorch's
fastest in each of them.

Exit codes: 0 if every part that ran succeeded; 1 otherwise; 130 when interrupted.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_suite.parts import KINDS, SuiteOptions, parts_of
from benchmarks.gpu_suite.run_parts import run_parts
from benchmarks.gpu_suite.summary import kernel_lists, readme_table, rows_in
from benchmarks.on_gpu import PRECISIONS
from benchmarks.workloads.gpu_sized import ON_GPU

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite on the command line; return the exit code."""
    chosen = _parser().parse_args(arguments)
    if chosen.table is not None:
        print(readme_table(rows_in(chosen.table)))
        return 0
    if chosen.kernels is not None:
        print("\n\n".join(map(kernel_lists, rows_in(chosen.kernels))))
        return 0
    options = SuiteOptions(
        out=chosen.out.resolve(),
        workloads=tuple(chosen.workloads or ON_GPU),
        precisions=tuple(chosen.precisions),
        is_rehearsal=chosen.rehearse,
        profiles=chosen.profiles,
        kinds=tuple(chosen.parts),
    )
    shutil.rmtree(options.turns, ignore_errors=True)
    options.turns.mkdir(parents=True)
    outcomes, was_interrupted = run_parts(
        parts_of(options), options.out, seconds=60 * chosen.minutes
    )
    if was_interrupted:
        return INTERRUPTED
    return int(any(one.status in ("failed", "timed out") for one in outcomes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_suite",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workloads", nargs="*", choices=[[], *ON_GPU], help="all by default")
    parser.add_argument("--minutes", type=float, default=25.0, help="for all of it (default 25)")
    parser.add_argument("--out", type=Path, default=Path("gpu-out"), metavar="DIR")
    parser.add_argument(
        "--precisions", nargs="+", choices=PRECISIONS, default=["bfloat16", "float16", "tf32",
        "float32"], help="in this order, each for all workloads",
    )  # fmt: skip
    parser.add_argument("--parts", nargs="+", choices=KINDS, default=list(KINDS), help="all")
    parser.add_argument("--profiles", type=int, default=3, metavar="N", help="of the slowest rows")
    parser.add_argument("--rehearse", action="store_true", help="on a machine without a GPU")
    parser.add_argument("--table", type=Path, metavar="DIR", help="print the rows in DIR, no more")
    parser.add_argument(
        "--kernels", type=Path, metavar="DIR", help="print what the GPU did in the rows in DIR"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
