# SPDX-License-Identifier: Apache-2.0
"""What casts cost with the cut and with RAF's greedy placement: `python -m benchmarks.placement`.

Two tables, printed and saved under benchmarks/results/: bytes and stand-alone cast kernels of the
workloads for both placements; and seconds of autocast beside those of the capture, over the number
of BERT layers. Nothing is compiled or run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch
from rich.console import Console
from rich.table import Table

import amp_ir
from amp_ir.demo.workloads import WORKLOADS

RESULTS = Path(__file__).parent / "results"
NAMES = ("bert1", "gpt2", "resnet50", "ssd", "lstm")


@attrs.frozen
class Placed:
    """One workload by one placement; `alone` and the bytes of casts are of the real kernels.

    `unavoidable_nbytes` is what casts of inputs (parameters and batch) move, in any placement;
    `value_nbytes` what the values of free ops move, by the cost model.
    """

    workload: str
    placement: str
    casts: int
    alone: int
    cast_nbytes: int
    unavoidable_nbytes: int
    value_nbytes: int


@attrs.frozen
class Scaling:
    """Seconds for a BERT of some layers."""

    layers: int
    bindings: int
    capture_seconds: float
    autocast_seconds: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=__doc__)
    parser.add_argument("workloads", nargs="*", default=[], help=", ".join(NAMES))
    parser.add_argument("--layers", type=int, nargs="*", default=[1, 6, 12, 24])
    parser.add_argument("--small", action="store_true", help="shapes of a test")
    parser.add_argument("--amp-dtype", default="bfloat16")
    chosen = parser.parse_args(arguments)
    placed: list[Placed] = []
    for name in chosen.workloads or NAMES:
        placed += place(name, small=chosen.small, amp_dtype=chosen.amp_dtype)
        save("placement.json", placed)
        print(f"{name}: done", flush=True)
    print_placed(placed)
    scaled: list[Scaling] = []
    for layers in chosen.layers:
        scaled.append(scale(layers, amp_dtype=chosen.amp_dtype))
        save("autocast_scaling.json", scaled)
        print(f"{layers} layers: done", flush=True)
    print_scaling(scaled)


def place(name: str, *, small: bool, amp_dtype: str) -> list[Placed]:
    """The costs of a workload, by the greedy placement and by the cut."""
    training = WORKLOADS[name].make(small=small)
    mod, args = amp_ir.trace_step(
        training.step, training.batch, model=training.model, optimizer=training.optimizer
    )
    rows = []
    for placement in ("greedy", "cut"):
        low = amp_ir.autocast(mod, args, amp_dtype=amp_dtype, placement=placement)
        plan = amp_ir.explain_plan(low)
        rows.append(
            Placed(
                workload=name,
                placement=placement,
                casts=len(plan.casts),
                alone=sum(cast.is_alone for cast in plan.casts),
                cast_nbytes=sum(cast.nbytes for cast in plan.casts),
                unavoidable_nbytes=sum(cast.nbytes for cast in plan.casts if cast.source < 0),
                value_nbytes=plan.cost_nbytes.chosen,
            )
        )
    return rows


def scale(layers: int, *, amp_dtype: str) -> Scaling:
    """Capture and cast a step of BERT with small tensors; their size matters to neither."""
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
    started = time.perf_counter()
    mod, args = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
    captured = time.perf_counter()
    amp_ir.autocast(mod, args, amp_dtype=amp_dtype)
    done = time.perf_counter()
    bindings = sum(len(block.bindings) for block in mod.ir["main"].body.blocks)
    return Scaling(layers, bindings, captured - started, done - captured)


def save(name: str, rows: Sequence[Placed] | Sequence[Scaling]) -> None:
    """Write rows as JSON under benchmarks/results/."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps([attrs.asdict(row) for row in rows], indent=1)
    (RESULTS / name).write_text(text + "\n")


def print_placed(rows: Sequence[Placed]) -> None:
    """Both placements of a workload in two lines; MiB a step."""
    names = ("workload", "placement", "casts", "alone", "cast MiB", "of inputs", "values MiB")
    table = Table(*names, box=None)
    for row in rows:
        sizes = (row.cast_nbytes, row.unavoidable_nbytes, row.value_nbytes)
        mebibytes = [f"{n / 2**20:.2f}" for n in sizes]
        table.add_row(row.workload, row.placement, str(row.casts), str(row.alone), *mebibytes)
    Console().print(table)


def print_scaling(rows: Sequence[Scaling]) -> None:
    """A line a number of layers."""
    table = Table("layers", "bindings", "capture s", "autocast s", "share", box=None)
    for row in rows:
        seconds = (f"{row.capture_seconds:.2f}", f"{row.autocast_seconds:.2f}")
        share = f"{row.autocast_seconds / row.capture_seconds:.2f}"
        table.add_row(str(row.layers), str(row.bindings), *seconds, share)
    Console().print(table)


if __name__ == "__main__":
    main()
