# SPDX-License-Identifier: Apache-2.0
"""The `amp-ir` command.

    amp-ir demo bert1 [--amp-dtype bfloat16] [--device cpu] [--steps 10] [--small]
    amp-ir explain bert1 [--module "*.attention"] [--amp-dtype bfloat16] [--html plan.html]
    amp-ir profile bert1|train.py [--amp-dtype bfloat16] [--trace trace.json] [--json profile.json]
    amp-ir report bert1|train.py [--amp-dtype bfloat16] [--out report.html]

Exit codes: 0; 2 for a wrong use, with a sentence on stderr; 130 when interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import amp_ir
from amp_ir.build import host_description
from amp_ir.demo.comparison import Report, compare
from amp_ir.demo.low_dtype import LOW_DTYPES, choose_low_dtype
from amp_ir.demo.table import comparison_table, footnote, summary
from amp_ir.demo.training_file import load_training
from amp_ir.demo.workloads import WORKLOADS, MissingPackage
from amp_ir.report import explain as explain_report
from amp_ir.report.commands import (
    add_profile_arguments,
    add_report_arguments,
    show_profile,
    write_report,
)
from amp_ir.target import target_of

WRONG_USE = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (amp_ir.errors.OptionError, amp_ir.errors.DeviceError, MissingPackage) as error:
        print(f"amp-ir {arguments.command}: {error}", file=sys.stderr)
        return WRONG_USE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="amp-ir", description="A mixed-precision training compiler for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"amp_ir {amp_ir.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train a model in float32 and in mixed precision, beside PyTorch",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train a model in float32 and in mixed precision, beside PyTorch.",
        epilog="workloads:\n"
        + "\n".join(f"  {one.name:<9} {one.description}" for one in WORKLOADS.values()),
    )
    demo.add_argument("workload", choices=list(WORKLOADS), help="what to train; see below")
    demo.add_argument("--device", default="cpu", help='where to train; "cpu"')
    demo.add_argument(
        "--amp-dtype", choices=LOW_DTYPES, help="the low dtype; default: what this CPU is good at"
    )
    demo.add_argument("--small", action="store_true", help="tiny shapes, to try the command")
    demo.add_argument(
        "--steps", type=_positive, default=10, metavar="N", help="timed steps (default 10)"
    )
    demo.set_defaults(run=_demo)
    explain = commands.add_parser(
        "explain", help="show where a workload's step uses which dtype, and why"
    )
    explain_report.add_arguments(explain, WORKLOADS)
    explain.set_defaults(run=_explain)
    profile = commands.add_parser(
        "profile", help="time every kernel of a step: modules, bytes, share of the roofline"
    )
    add_profile_arguments(profile, WORKLOADS)
    profile.set_defaults(run=_profile)
    report = commands.add_parser(
        "report", help="write a page with a step's memory over time, kernels and casts"
    )
    add_report_arguments(report, WORKLOADS)
    report.set_defaults(run=_report)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps; expected 1 or more")
    return int(text)


def _demo(arguments: argparse.Namespace) -> int:
    target_of(arguments.device)
    workload = WORKLOADS[arguments.workload]
    low = choose_low_dtype(arguments.amp_dtype)
    console = Console()
    console.print(f"[bold]{workload.name}[/]: {workload.description}", highlight=False)
    console.print(f"{low.dtype}: {low.reason}", highlight=False)
    with _stages() as report:
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
    """Why the times that were measured may mean little."""
    if is_small:
        yield "Tiny shapes (--small): the times say nothing about the real workload."
    with contextlib.suppress(AttributeError, OSError):
        # Our own threads are among the load; more than them is somebody else's.
        load, cpus = os.getloadavg()[0], os.cpu_count() or 1
        if load > cpus + 0.5:
            yield f"The machine is busy (load {load:.1f} on {cpus} CPUs): times are not its best."


def _explain(arguments: argparse.Namespace) -> int:
    training = WORKLOADS[arguments.workload].make(small=arguments.small)
    mod, args = amp_ir.trace_step(
        training.step, training.batch, model=training.model, optimizer=training.optimizer
    )
    mod = amp_ir.autocast(mod, args, amp_dtype=arguments.amp_dtype)
    return explain_report.show(amp_ir.explain_plan(mod), arguments)


def _profile(arguments: argparse.Namespace) -> int:
    measured = _measure(arguments)
    return show_profile(measured.profile, measured.memory, arguments)


def _report(arguments: argparse.Namespace) -> int:
    measured = _measure(arguments)
    return write_report(
        f"{measured.name} in {arguments.amp_dtype}",
        measured.profile,
        measured.memory,
        measured.plan,
        machine=host_description(),
        out=arguments.out,
    )


@attrs.frozen
class _Measured:
    name: str
    memory: amp_ir.MemoryReport
    profile: amp_ir.KernelProfile
    plan: amp_ir.CastPlan | None


def _measure(arguments: argparse.Namespace) -> _Measured:
    """Memory and time of the training that the command line names, beside its step in float32."""
    name = arguments.training
    with _stages() as report:
        report("building", name)
        if name in WORKLOADS:
            training: Any = WORKLOADS[name].make(small=arguments.small)
        else:
            training = load_training(Path(name))
        report("capturing the step")
        mod, args = amp_ir.trace_step(
            training.step,
            training.batch,
            model=training.model,
            optimizer=training.optimizer,
            scaler=getattr(training, "scaler", None),
        )
        low, plan = mod, None
        if arguments.amp_dtype != "float32":
            report("choosing casts")
            low = amp_ir.autocast(mod, args, amp_dtype=arguments.amp_dtype)
            plan = amp_ir.explain_plan(low)
        report("planning memory")
        memory = amp_ir.memory_report(low, args, baseline=mod if plan is not None else None)
        report("compiling and timing")
        profile = amp_ir.profile_kernels(low, "cpu", args, steps=arguments.steps)
    return _Measured(name, memory, profile, plan)


@contextlib.contextmanager
def _stages() -> Iterator[Report]:
    """Names the stage that is at work: a live line on a terminal, else a line a stage.

    Goes to stderr, so that what is piped on is the table alone.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _a_line_a_stage()
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)
        yield lambda stage, part="": progress.update(task, description=f"{stage} {part}")


def _a_line_a_stage() -> Report:
    told: list[str] = []

    def report(stage: str, part: str = "") -> None:
        if stage not in told[-1:]:
            told.append(stage)
            print(stage, file=sys.stderr, flush=True)

    return report
