# SPDX-License-Identifier: Apache-2.0
"""The memory of steps: `python -m benchmarks.memory [WORKLOAD ...]`.

Two tables, printed and saved under benchmarks/results/ row by row. Peaks: planned, its lower bound,
measured, and PyTorch eager's (under torch.autocast for bfloat16). Measured is the rise of the
resident set during two steps, in a process of its own (benchmarks/peak.py), plus the bytes of the
state and the batch that were allocated before. Budgets: whether `memory_budget` at a share of the
bytes that are not state is met, else the smallest that is; the calls that are recomputed for it,
and the chunks of the loss; and, where the step is run, its time beside that without a budget, in
turns. A share of all bytes would require less than the state alone (0.60 of bert1's peak, 0.72 of a
deep GPT-2's), which no compiler can free.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from rich.console import Console
from rich.table import Table

import amp_ir
from amp_ir.api import lower
from amp_ir.demo.workloads import WORKLOADS, Training
from amp_ir.errors import BudgetError
from amp_ir.files.atomic_file import write_text
from benchmarks.chosen_names import check_names
from benchmarks.peak import MEBIBYTE, OURS, captured, measured_peak
from benchmarks.record import RESULTS, describe_machine
from benchmarks.workloads.further import ALL

NAMES = ("bert1", "mlp", "gpt2", "resnet50", "ssd", "lstm")
# These are run within a budget; a GPT-2 of many layers is compiled only.
BUDGETED = ("bert1", "resnet50")
DTYPES = ("float32", "bfloat16")


@attrs.frozen
class Peak:
    """One workload in one dtype; all numbers are bytes."""

    workload: str
    dtype: str
    planned: int
    lower_bound: int
    measured: int
    eager: int


@attrs.frozen
class Budget:
    """One budget: `share` of the bytes that are not state; milliseconds only if it was run."""

    workload: str
    dtype: str
    share: float
    state: int
    free: int
    budget: int
    planned: int | None
    least: int | None
    reruns: int
    blocks: int
    milliseconds: float | None = None
    free_milliseconds: float | None = None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the measurements on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("workloads", nargs="*", default=[], help=f"default {', '.join(NAMES)}")
    parser.add_argument("--all", action="store_true", help="the peaks of all workloads")
    parser.add_argument("--small", action="store_true", help="shapes of a test")
    parser.add_argument("--budgets", nargs="*", type=float, default=[0.6], metavar="SHARE")
    parser.add_argument("--only", choices=("peaks", "budgets"), help="one of the two tables")
    parser.add_argument("--layers", type=int, default=12, help="of the GPT-2 that is compiled only")
    chosen = parser.parse_args(arguments)
    check_names(parser, chosen.workloads, ALL, "workload")
    names = chosen.workloads or list(ALL if chosen.all else NAMES)
    if chosen.only != "budgets":
        peaks: list[Peak] = []
        for name in names:
            for dtype in DTYPES:
                peaks.append(measure_peak(name, dtype, small=chosen.small))
                save("memory.json", peaks, chosen)  # at once: the rest may take minutes
        Console(width=110).print(peak_table(peaks))
    if chosen.only != "peaks":
        budgets: list[Budget] = []
        for budget in measure_budgets(chosen):
            budgets.append(budget)
            save("memory_budget.json", budgets, chosen)
        Console(width=110).print(budget_table(budgets))


def measure_peak(name: str, dtype: str, *, small: bool) -> Peak:
    """Measure the peaks of one workload in one dtype.

    Raises:
        PeakError: as `measured_peak`.
    """
    plan = lower(captured(ALL[name].make(small=small), dtype)).plan
    measured = {who: measured_peak(name, dtype, who, small=small) for who in (OURS, "eager")}
    bound = plan.peak_bytes - plan.arena_bytes + plan.lower_bound_bytes
    tell(f"{name} {dtype}: peaks measured")
    return Peak(name, dtype, plan.peak_bytes, bound, measured[OURS], measured["eager"])


def measure_budgets(chosen: argparse.Namespace) -> Iterator[Budget]:
    """Measure steps run within a budget, and plan a deep GPT-2's within one."""
    names = [name for name in BUDGETED if name in (chosen.workloads or BUDGETED)]
    for share in chosen.budgets:
        for dtype in DTYPES:
            for name in names:
                training = WORKLOADS[name].make(small=chosen.small)
                row = _budget(name, training, dtype, share)
                tell(f"{name} {dtype}: planned within {share:.0%}")
                yield _with_times(training, dtype, row)
            if "gpt2" in (chosen.workloads or NAMES):
                deep = deep_gpt2(chosen.layers, small=chosen.small)
                yield _budget(f"gpt2 x {chosen.layers}", deep, dtype, share)
                tell(f"gpt2 x {chosen.layers} {dtype}: planned within {share:.0%}")


def tell(what: str) -> None:
    """Write a line of progress to stderr, so that the tables can be piped."""
    print(what, file=sys.stderr, flush=True)


def _budget(name: str, training: Training, dtype: str, share: float) -> Budget:
    mod = captured(training, dtype)
    free = lower(mod).plan
    budget = free.state_bytes + int(share * (free.peak_bytes - free.state_bytes))
    known = (name, dtype, share, free.state_bytes, free.peak_bytes, budget)
    try:
        plan = lower(mod, memory_budget=budget).plan
    except BudgetError as error:
        plan = lower(mod, memory_budget=error.least_bytes).plan
    is_held = plan.peak_bytes <= budget
    reruns = sum(call.is_rerun for call in plan.calls)
    blocks = max((one.chunks for one in plan.chunked_losses), default=1)
    held, least = (plan.peak_bytes, None) if is_held else (None, plan.peak_bytes)
    return Budget(*known, held, least, reruns, blocks)


def _with_times(training: Training, dtype: str, row: Budget) -> Budget:
    """Run the step within the budget, or within the smallest that can be met, and without."""
    mod = captured(training, dtype)
    budget = row.planned if row.planned is not None else row.least
    steps = [amp_ir.compile(mod), amp_ir.compile(mod, memory_budget=budget)]
    times: list[list[float]] = [[], []]
    for round_ in range(12):
        for step, spent in zip(steps, times, strict=True):
            started = time.perf_counter()
            step(*training.batch)
            if round_ > 1:
                spent.append((time.perf_counter() - started) * 1e3)
    free, within = (statistics.median(spent) for spent in times)
    return attrs.evolve(row, milliseconds=within, free_milliseconds=free)


def deep_gpt2(layers: int, *, small: bool) -> Training:
    """Return the GPT-2 workload with another number of layers."""
    import transformers

    shape: dict[str, Any] = {}
    if small:
        shape = {"n_embd": 32, "n_head": 2, "n_positions": 16, "vocab_size": 96}
        shape |= {"bos_token_id": 95, "eos_token_id": 95}
    config = transformers.GPT2Config(
        n_layer=layers, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False, **shape
    )
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(0, config.vocab_size, (2, 8) if small else (4, 128))

    def loss(ids: torch.Tensor) -> torch.Tensor:
        scores = model(ids).logits[:, :-1]
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())

    return Training(model, torch.optim.AdamW(model.parameters(), lr=3e-4), loss, (ids,))


def peak_table(rows: Sequence[Peak]) -> Table:
    """Return the table of peaks in MiB, and their ratios."""
    table = Table("workload", "dtype", title="peak MiB of a training step, state included")
    for name in ("planned", "over bound", "measured", "off plan", "eager", "planned / eager"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.workload,
            row.dtype,
            f"{row.planned / MEBIBYTE:.1f}",
            f"{row.planned / row.lower_bound - 1:.2%}",
            f"{row.measured / MEBIBYTE:.1f}",
            f"{row.measured / row.planned - 1:+.2%}",
            f"{row.eager / MEBIBYTE:.1f}",
            f"{row.planned / row.eager:.3f}",
        )
    return table


def budget_table(rows: Sequence[Budget]) -> Table:
    """Return the table of budgets in MiB and the peaks; "least" where the budget was not met."""
    table = Table("workload", "dtype", title="memory_budget as a share of what is not state, MiB")
    for name in (
        "share",
        "without",
        "state",
        "budget",
        "held",
        "least",
        "reruns",
        "blocks",
        "ms",
        "x",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        sizes = (row.free, row.state, row.budget, row.planned, row.least)
        ratio = None
        if row.milliseconds is not None and row.free_milliseconds is not None:
            ratio = row.milliseconds / row.free_milliseconds
        table.add_row(
            row.workload,
            row.dtype,
            f"{row.share:.0%}",
            *("-" if size is None else f"{size / MEBIBYTE:.1f}" for size in sizes),
            str(row.reruns),
            str(row.blocks),
            "-" if row.milliseconds is None else f"{row.milliseconds:.0f}",
            "-" if ratio is None else f"{ratio:.2f}",
        )
    return table


def save(name: str, rows: Sequence[Peak] | Sequence[Budget], chosen: argparse.Namespace) -> None:
    """Write rows and the machine's description as JSON; tiny shapes are measured but not saved."""
    if chosen.small:
        return
    RESULTS.mkdir(exist_ok=True)
    document = {"machine": describe_machine(), "rows": [attrs.asdict(row) for row in rows]}
    write_text(RESULTS / name, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
