# SPDX-License-Identifier: Apache-2.0
"""Cast traffic with the minimum cut and RAF's greedy placement: `python -m benchmarks.placement`.

Two tables, printed and saved under benchmarks/results/. The first has, for the workloads and both
placements, the bytes that the compiled step moves because of dtypes: casts that are separate
kernels, low copies beside float32 values, and the cost of tensors in float32 above low ones;
below it, the remaining cast traffic of the cut, by reason. The second has seconds of autocast
beside those of the capture, over the number of BERT layers. Nothing is compiled or run.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from rich.console import Console
from rich.table import Table

import amp_ir
from amp_ir.amp.plan import CastPlan
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.files.atomic_file import write_text
from benchmarks.chosen_names import check_names
from benchmarks.record import add_results_option

NAMES = ("bert1", "gpt2", "resnet50", "ssd", "lstm")
PLACEMENTS = ("greedy", "cut")


@attrs.frozen
class Placed:
    """One workload with one placement; bytes are those of the step's kernels.

    Attributes:
        alone: casts that are separate kernels.
        alone_at_kernels: those of them that cast what a kernel or library call of the step makes;
            the others make the low copies of parameters and of the batch for library calls.
        cast_nbytes: bytes moved by separate casts, by second copies, and by values that the
            placement keeps in float32.
        rule_nbytes: bytes moved by values that a rule keeps in float32, above those of low values.
        model_nbytes: bytes moved by values of free ops, by the cost model.
        bound_nbytes: the lower bound of any placement for them.
    """

    workload: str
    placement: str
    casts: int
    alone: int
    alone_at_kernels: int
    cast_nbytes: int
    rule_nbytes: int
    model_nbytes: int
    bound_nbytes: int
    cast_traffic: str


@attrs.frozen
class Scaling:
    """Seconds for a BERT with a number of layers."""

    layers: int
    bindings: int
    capture_seconds: float
    autocast_seconds: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the measurements on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=__doc__)
    parser.add_argument("workloads", nargs="*", default=[], help=", ".join(NAMES))
    parser.add_argument("--layers", type=int, nargs="*", default=[1, 6, 12, 24])
    parser.add_argument("--small", action="store_true", help="shapes of a test")
    parser.add_argument("--amp-dtype", default="bfloat16")
    add_results_option(parser)
    chosen = parser.parse_args(arguments)
    check_names(parser, chosen.workloads, NAMES, "workload")
    placed: list[Placed] = []
    for name in chosen.workloads or NAMES:
        placed += place(name, small=chosen.small, amp_dtype=chosen.amp_dtype)
        save(chosen.results / "placement.json", placed)
    scaled: list[Scaling] = []
    for layers in chosen.layers:
        scaled.append(scale(layers, amp_dtype=chosen.amp_dtype))
        save(chosen.results / "autocast_scaling.json", scaled)
    tables = [table_of_placements(placed)] if placed else []
    tables += [table_of_scaling(scaled)] if scaled else []
    reports = [
        f"{one.workload}, {one.placement}:\n{one.cast_traffic}\n"
        for one in placed
        if one.placement == "cut"
    ]
    show(tables, reports, chosen.results / "placement.txt")


def place(name: str, *, small: bool, amp_dtype: str) -> list[Placed]:
    """Return the costs of a workload, by the greedy placement and by the cut."""
    training = WORKLOADS[name].make(small=small)
    mod, args = amp_ir.trace_step(
        training.step, training.batch, model=training.model, optimizer=training.optimizer
    )
    rows = []
    for placement in PLACEMENTS:
        low = amp_ir.autocast(mod, args, amp_dtype=amp_dtype, placement=placement)
        rows.append(row_of(name, placement, amp_ir.explain_plan(low)))
    return rows


def row_of(name: str, placement: str, plan: CastPlan) -> Placed:
    """Return the numbers of an explained plan."""
    alone = [cast for cast in plan.casts if cast.is_alone]
    of_casts = [one for one in plan.moved if one.is_free or one.what != "float32"]
    return Placed(
        workload=name,
        placement=placement,
        casts=len(plan.casts),
        alone=len(alone),
        alone_at_kernels=sum(cast.source >= 0 for cast in alone),
        cast_nbytes=sum(one.nbytes for one in of_casts),
        rule_nbytes=sum(one.nbytes for one in plan.moved) - sum(one.nbytes for one in of_casts),
        model_nbytes=plan.cost_nbytes.chosen,
        bound_nbytes=plan.cost_nbytes.bound,
        cast_traffic=plan.cast_traffic(),
    )


def scale(layers: int, *, amp_dtype: str) -> Scaling:
    """Capture and cast a step of BERT with small tensors; their size affects neither time."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=96,
        num_hidden_layers=layers,
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=64,
    )
    model = transformers.BertForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        return loss

    batch = (torch.randint(0, 96, (2, 8)),)
    # Garbage of the previous size must not be collected in this one's time.
    gc.collect()
    started = time.perf_counter()
    mod, args = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
    captured = time.perf_counter()
    amp_ir.autocast(mod, args, amp_dtype=amp_dtype)
    done = time.perf_counter()
    bindings = sum(len(block.bindings) for block in mod.ir["main"].body.blocks)
    return Scaling(layers, bindings, captured - started, done - captured)


def save(path: Path, rows: Sequence[Any]) -> None:
    """Write rows as JSON."""
    path.parent.mkdir(exist_ok=True, parents=True)
    write_text(path, json.dumps([attrs.asdict(row) for row in rows], indent=1) + "\n")


def table_of_placements(rows: Sequence[Placed]) -> Table:
    """Return two lines per workload, one a placement: MiB a step, the cut's share of greedy's."""
    names = ("workload", "placement", "casts", "alone", "at kernels", "cast MiB", "share",
             "float32 by rule", "all MiB", "share", "model MiB", "bound")  # fmt: skip
    table = Table(*names, box=None, title="bytes that a step moves because of dtypes")
    greedy = {row.workload: row for row in rows if row.placement == "greedy"}
    for row in rows:
        first = greedy.get(row.workload, row)
        everything = row.cast_nbytes + row.rule_nbytes
        table.add_row(
            row.workload,
            row.placement,
            str(row.casts),
            str(row.alone),
            str(row.alone_at_kernels),
            _mebibytes(row.cast_nbytes),
            _share(row.cast_nbytes, first.cast_nbytes),
            _mebibytes(row.rule_nbytes),
            _mebibytes(everything),
            _share(everything, first.cast_nbytes + first.rule_nbytes),
            _mebibytes(row.model_nbytes),
            _mebibytes(row.bound_nbytes),
        )
    return table


def table_of_scaling(rows: Sequence[Scaling]) -> Table:
    """Return a line per number of layers."""
    names = ("layers", "bindings", "capture s", "autocast s", "share", "autocast us a binding")
    table = Table(*names, box=None, title="AutoCast of BERT beside its capture")
    for row in rows:
        table.add_row(
            str(row.layers),
            str(row.bindings),
            f"{row.capture_seconds:.2f}",
            f"{row.autocast_seconds:.2f}",
            f"{row.autocast_seconds / row.capture_seconds:.2f}",
            f"{row.autocast_seconds / row.bindings * 1e6:.0f}",
        )
    return table


def show(tables: Sequence[Table], reports: Sequence[str], path: Path) -> None:
    """Print tables and cast traffic, and save them as text."""
    console = Console(record=True, width=140)
    for table in tables:
        console.print(table)
        console.print()
    for text in reports:
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    path.parent.mkdir(exist_ok=True, parents=True)
    write_text(path, console.export_text(styles=False))


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f}"


def _share(mine: int, greedy: int) -> str:
    return f"{mine / greedy:.2f}" if greedy else "-"


if __name__ == "__main__":
    main()
