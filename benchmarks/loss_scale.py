# SPDX-License-Identifier: Apache-2.0
"""The cost of dynamic loss scaling: `python -m benchmarks.loss_scale [WORKLOAD ...]`.

For each workload the compiled step with and without an `amp_ir.GradScaler`, and PyTorch's step with
autocast with and without a `torch.amp.GradScaler`, run in turns in one process. The table has
medians and the ratio of each pair. The ratio is the median over the rounds of each round's ratio:
consecutive measurements see the same state of the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import amp_ir
from amp_ir.demo.workloads import WORKLOADS, Training
from amp_ir.files.atomic_file import write_text
from benchmarks.chosen_names import check_names
from benchmarks.record import RESULTS, describe_machine

# Small enough that no workload overflows: a skipped step would do less work in PyTorch.
SCALE = 2.0**10


@attrs.frozen
class Cost:
    """One workload; milliseconds per step without and with a scaler, and the ratio of the two."""

    workload: str
    dtype: str
    ours: tuple[float, float]
    ours_ratio: float
    torch: tuple[float, float]
    torch_ratio: float
    skips: int


def scaled_step(training: Training, scaler: torch.amp.GradScaler) -> Callable[..., torch.Tensor]:
    """Run the training step of PyTorch's note on mixed precision."""

    def step(*batch: torch.Tensor) -> torch.Tensor:
        loss = training.loss(*batch)
        scaler.scale(loss).backward()
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()
        return loss.detach()

    return step


def compiled(
    training: Training, step: Callable[..., Any], scaler: Any, dtype: str
) -> amp_ir.CompiledStep:
    """Return the step, captured, cast and compiled."""
    mod, args = amp_ir.trace_step(
        step, training.batch, model=training.model, optimizer=training.optimizer, scaler=scaler
    )
    if dtype != "float32":
        mod = amp_ir.autocast(mod, args, amp_dtype=dtype)
    return amp_ir.compile(mod)


def eager(training: Training, scaler: torch.amp.GradScaler, dtype: str) -> Callable[..., Any]:
    """Return PyTorch's step, under autocast for a low dtype."""
    is_low = dtype != "float32"
    low = getattr(torch, dtype) if is_low else torch.bfloat16

    def step(*batch: torch.Tensor) -> None:
        with torch.autocast(batch[0].device.type, low, enabled=is_low):
            loss = training.loss(*batch)
        scaler.scale(loss).backward()
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()

    return step


def measure(name: str, dtype: str, *, rounds: int, small: bool) -> Cost:
    """Time the four steps of one workload in turns."""
    trainings = [WORKLOADS[name].make(small=small) for _ in range(4)]
    batch = trainings[0].batch
    scaler = amp_ir.GradScaler("cpu", init_scale=SCALE)
    steps: list[Callable[..., Any]] = [
        compiled(trainings[0], trainings[0].step, None, dtype),
        compiled(trainings[1], scaled_step(trainings[1], scaler), scaler, dtype),
        eager(trainings[2], torch.amp.GradScaler("cpu", enabled=False), dtype),
        eager(trainings[3], torch.amp.GradScaler("cpu", init_scale=SCALE), dtype),
    ]
    for step in (*steps, *steps):
        step(*batch)
    times: list[list[float]] = [[] for _ in steps]
    for number in range(rounds):
        # The two of a pair take turns in going first.
        order = (0, 1, 2, 3) if number % 2 else (1, 0, 3, 2)
        for k in order:
            started = time.perf_counter()
            steps[k](*batch)
            times[k].append((time.perf_counter() - started) * 1e3)
    medians = [statistics.median(one) for one in times]
    ratios = [
        statistics.median(b / a for a, b in zip(times[k], times[k + 1], strict=True))
        for k in (0, 2)
    ]
    log = scaler.log
    assert log is not None
    return Cost(
        name, dtype, (medians[0], medians[1]), ratios[0], (medians[2], medians[3]), ratios[1],
        log.skips,
    )  # fmt: skip


def table_of(costs: list[Cost]) -> Table:
    """Return the costs as text."""
    table = Table(title="milliseconds a step without and with a dynamic loss scale (medians)")
    for heading in ("workload", "dtype"):
        table.add_column(heading)
    for heading in ("amp_ir", "scaled", "ratio", "PyTorch", "scaled", "ratio", "skips"):
        table.add_column(heading, justify="right")
    for cost in costs:
        table.add_row(
            cost.workload,
            cost.dtype,
            *(f"{one:.1f}" for one in cost.ours),
            f"{cost.ours_ratio:.3f}",
            *(f"{one:.1f}" for one in cost.torch),
            f"{cost.torch_ratio:.3f}",
            str(cost.skips),
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the measurements on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loss_scale", description=__doc__)
    parser.add_argument("workloads", nargs="*", default=[], help=", ".join(WORKLOADS))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--rounds", type=int, default=15, help="steps of each variant, in turns")
    parser.add_argument("--small", action="store_true", help="shapes of a test")
    parser.add_argument("--save", metavar="NAME", help="file under benchmarks/results/")
    options = parser.parse_args(arguments)
    check_names(parser, options.workloads, WORKLOADS, "workload")
    cases = [(name, dtype) for name in options.workloads or WORKLOADS for dtype in options.dtypes]
    costs = []
    for name, dtype in track(cases, description="measuring", console=Console(stderr=True)):
        costs.append(measure(name, dtype, rounds=options.rounds, small=options.small))
        if options.save:
            content = {"machine": describe_machine(), "costs": [attrs.asdict(one) for one in costs]}
            text = json.dumps(content, indent=1) + "\n"
            write_text(RESULTS / f"{options.save}.json", text)
    Console(width=max(Console().width, 110)).print(table_of(costs))


if __name__ == "__main__":
    main()
