# SPDX-License-Identifier: Apache-2.0
"""`amp-ir demo`: a workload in float32 and in mixed precision, beside PyTorch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console

import amp_ir
from amp_ir.commands import SUMMARIES
from amp_ir.demo.comparison import compare
from amp_ir.demo.low_dtype import LOW_DTYPES, choose_low_dtype
from amp_ir.demo.stage_progress import stages
from amp_ir.demo.table import comparison_table, footnote, summary
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.host.machine_load import load_warning
from amp_ir.ir.target import target_of
from amp_ir.vm.build import host_description


def add_demo(commands: Any) -> None:
    """Add the command."""
    demo = commands.add_parser(
        "demo",
        help=SUMMARIES["demo"],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train a model in float32 and in mixed precision, beside PyTorch.",
        epilog="workloads:\n"
        + "\n".join(f"  {one.name:<9} {one.description}" for one in WORKLOADS.values()),
    )
    demo.add_argument("workload", choices=list(WORKLOADS), help="what to train; see below")
    demo.add_argument("--device", default="cpu", help='where to train; "cpu" or "cuda"')
    demo.add_argument(
        "--amp-dtype", choices=LOW_DTYPES, help="the low dtype; default: what this CPU is good at"
    )
    demo.add_argument("--small", action="store_true", help="tiny shapes, to try the command")
    demo.add_argument(
        "--steps", type=_positive, default=10, metavar="N", help="timed steps (default 10)"
    )
    demo.set_defaults(run=_demo)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps; expected 1 or more")
    return int(text)


def _demo(arguments: argparse.Namespace) -> int:
    target_of(arguments.device)
    workload = WORKLOADS[arguments.workload]
    low = choose_low_dtype(arguments.amp_dtype, arguments.device)
    console = Console()
    console.print(f"[bold]{workload.name}[/]: {workload.description}", highlight=False)
    console.print(f"{low.dtype}: {low.reason}", highlight=False)
    with stages() as report:
        comparison = compare(
            workload,
            low_dtype=low.dtype,
            device=arguments.device,
            small=arguments.small,
            steps=arguments.steps,
            report=report,
        )
    machine = f"{host_description()}, {torch.get_num_threads()} threads"
    versions = f"torch {torch.__version__}, amp_ir {amp_ir.__version__}"
    console.print(f"{comparison.parameters:,} parameters; {machine}; {versions}", highlight=False)
    for warning in _doubts(arguments.small):
        console.print(warning, style="yellow", highlight=False)
    console.print()
    console.print(comparison_table(comparison))
    console.print()
    console.print(summary(comparison), highlight=False)
    console.print(footnote(comparison), style="dim", highlight=False)
    return 0


def _doubts(is_small: bool) -> Iterator[str]:
    """Return why the measured times may be unreliable."""
    if is_small:
        yield "Tiny shapes (--small): the times say nothing about the real workload."
    yield from filter(None, [load_warning()])
