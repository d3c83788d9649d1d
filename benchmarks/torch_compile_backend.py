# SPDX-License-Identifier: Apache-2.0
"""The backend of torch.compile: `python -m benchmarks.torch_compile_backend [WORKLOAD ...]`.

Forward and backward, dropout on, without an optimizer: eager PyTorch, torch.compile's own backend
and backend="amp_ir" in turns in one process, the others under torch.autocast in bfloat16. Times are
processor seconds of all threads, whose medians are divided by amp_ir's: what else runs on the
machine changes them less than wall time, and only the ratios mean something. First calls are
processor seconds too, from empty caches, with those of the compilers that were started. Prints the
table of docs/integrations.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from amp_ir.demo.workloads import WORKLOADS, Training
from benchmarks.peers import cold_compiler

DTYPES = ("float32", "bfloat16")
VARIANTS = ("amp_ir", "inductor", "eager")
_DROPOUT = 0.1


@attrs.frozen
class Row:
    """One workload in one dtype: processor seconds of a step, and of first calls, by variant."""

    workload: str
    dtype: str
    seconds: dict[str, float]
    first_seconds: dict[str, float]

    def ratio(self, variant: str) -> float:
        """Return a variant's seconds divided by amp_ir's."""
        return self.seconds[variant] / self.seconds["amp_ir"]

    def __str__(self) -> str:
        """Return the row of the table."""
        first = ", ".join(f"{self.first_seconds[name]:.0f}" for name in VARIANTS[:2])
        ratios = f"{self.ratio('inductor'):.2f} | {self.ratio('eager'):.2f}"
        return f"| {self.workload}, {self.dtype} | {ratios} | {first} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for, and print a row as it is known."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.torch_compile_backend", description=__doc__
    )
    parser.add_argument("workloads", nargs="*", default=["bert1", "gpt2", "mlp"])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--turns", type=int, default=15, help="timed steps of each (default 15)")
    parser.add_argument("--small", action="store_true", help="shapes of a test")
    chosen = parser.parse_args(arguments)
    unknown = sorted(set(chosen.workloads) - set(WORKLOADS))
    if unknown:
        raise SystemExit(f"{', '.join(unknown)}: expected some of {', '.join(WORKLOADS)}")
    print(f"load of the machine {os.getloadavg()[0]:.1f}", file=sys.stderr)
    print("| | Inductor / amp_ir | eager / amp_ir | first call, s: amp_ir, Inductor |")
    print("|---|---|---|---|")
    for name in chosen.workloads:
        for dtype in chosen.dtypes:
            print(measure(name, dtype, turns=chosen.turns, small=chosen.small), flush=True)


def measure(name: str, dtype: str, *, turns: int, small: bool = False) -> Row:
    """Run the variants of a workload in turns."""
    # In this process, so that its seconds are counted.
    torch._inductor.config.compile_threads = 1
    steps = {variant: make_step(name, dtype, variant, small=small) for variant in VARIANTS}
    first: dict[str, float] = {}
    with cold_compiler():
        for variant, step in steps.items():
            begun = _processor_seconds()
            step()
            first[variant] = _processor_seconds() - begun
            step()
        seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for _ in range(turns):
            for variant, step in steps.items():
                started = time.process_time()
                step()
                seconds[variant].append(time.process_time() - started)
    return Row(name, dtype, {k: statistics.median(v) for k, v in seconds.items()}, first)


def make_step(name: str, dtype: str, variant: str, *, small: bool) -> Callable[[], Any]:
    """Return forward and backward of a training of its own; gradients are cleared before."""
    training: Training = WORKLOADS[name].make(small=small, dropout=_DROPOUT)
    loss = training.loss
    if variant == "inductor":
        loss = torch.compile(loss)
    elif variant == "amp_ir":
        options = {"amp_dtype": dtype}
        loss = torch.compile(loss, backend="amp_ir", options=options)
    in_autocast = dtype != "float32" and variant != "amp_ir"

    def step() -> None:
        training.optimizer.zero_grad()
        with torch.autocast("cpu", getattr(torch, dtype), enabled=in_autocast):
            value = loss(*training.batch)
        value.backward()

    return step


def _processor_seconds() -> float:
    """Return the seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    # What was compiled before is no first call.
    os.environ["AMP_IR_CACHE"] = "off"
    main()
