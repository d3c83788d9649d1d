# SPDX-License-Identifier: Apache-2.0
"""Compile times of a step's second shape: `python -m benchmarks.second_shapes [NAME ...]`.

The processor's seconds from `trace_step` to a step that is ready, of a first shape and of another
one right after it, in one process: a smaller batch, and shorter sequences where there are any. Each
round begins with an empty compile cache, without machine code and traced ops of earlier rounds; the
first round is not counted, since it imports what the others find. Processor's seconds, for load on
the machine increases wall times; those of the system's linker, a process of its own, are not in
them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import amp_ir
from amp_ir.capture import call_templates, repeated_ops
from amp_ir.demo.workloads import WORKLOADS, Batch, Training
from amp_ir.vm import build
from benchmarks.chosen_names import check_names

NAMES = ("bert1", "gpt2")
DTYPES = ("float32", "bfloat16")
FIELDS = ("capture", "autocast", "compile", "all")
TOKENS = ("bert1", "gpt2")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the measurements on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.second_shapes", description=__doc__)
    parser.add_argument("names", nargs="*", default=[], help=", ".join(WORKLOADS))
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--small", action="store_true", help="shapes of a test")
    parser.add_argument("--rounds", type=int, default=4, help="the first is not counted")
    chosen = parser.parse_args(arguments)
    check_names(parser, chosen.names, WORKLOADS, "workload")
    print(f"{'':16}{'':16}" + "".join(f"{one:>10}" for one in FIELDS))
    for name in chosen.names or NAMES:
        training = WORKLOADS[name].make(small=chosen.small)
        for dtype in chosen.dtypes:
            for label, other in other_shapes(name).items():
                rows = compare(training, dtype, other(training.batch), chosen.rounds)
                for kind, row in rows.items():
                    numbers = "".join(f"{row[one]:10.3f}" for one in FIELDS)
                    print(f"{name:6}{dtype:10}{label + ' ' + kind:16}{numbers}", flush=True)


def other_shapes(name: str) -> dict[str, Callable[[Batch], Batch]]:
    """Return the changes of a workload's batch to three quarters of its samples, or tokens."""

    def fewer(batch: Batch) -> Batch:
        return tuple(one[: len(one) * 3 // 4].contiguous() for one in batch)

    def shorter(batch: Batch) -> Batch:
        return tuple(one[:, : one.shape[1] * 3 // 4].contiguous() for one in batch)

    return {"batch": fewer, **({"length": shorter} if name in TOKENS else {})}


def compare(
    training: Training, dtype: str, other: Batch, rounds: int
) -> dict[str, dict[str, float]]:
    """Return the medians of both shapes, and their quotients."""
    before = os.environ.get("AMP_IR_CACHE")
    rows: dict[str, list[dict[str, float]]] = {"first": [], "second": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(max(rounds, 2)):
            os.environ["AMP_IR_CACHE"] = str(Path(folder, str(number)))
            for earlier in (build.LIBRARIES, repeated_ops.OUTCOMES, call_templates.TEMPLATES):
                earlier.clear()
            rows["first"].append(measure(training, dtype, training.batch))
            rows["second"].append(measure(training, dtype, other))
    if before is None:
        del os.environ["AMP_IR_CACHE"]
    else:
        os.environ["AMP_IR_CACHE"] = before
    first, second = (
        {one: statistics.median(row[one] for row in found[1:]) for one in FIELDS}
        for found in rows.values()
    )
    quotient = {one: second[one] / first[one] if first[one] else 0.0 for one in FIELDS}
    return {"first": first, "second": second, "quotient": quotient}


def measure(training: Training, dtype: str, batch: tuple[torch.Tensor, ...]) -> dict[str, float]:
    """Return the processor's seconds of one compilation."""
    times = [time.process_time()]
    mod, args = amp_ir.trace_step(
        training.step, batch, model=training.model, optimizer=training.optimizer
    )
    times.append(time.process_time())
    if dtype != "float32":
        mod = amp_ir.autocast(mod, args, amp_dtype=dtype)
    times.append(time.process_time())
    train = amp_ir.compile(mod)
    times.append(time.process_time())
    assert "cache" not in train.report.seconds, "the step was loaded, not compiled"
    parts = [after - before for before, after in zip(times, times[1:], strict=False)]
    return dict(zip(FIELDS, [*parts, times[-1] - times[0]], strict=True))


if __name__ == "__main__":
    main()
