# SPDX-License-Identifier: Apache-2.0
"""The `amp-ir` command.

    amp-ir demo bert1 [--amp-dtype bfloat16] [--device cpu] [--steps 10] [--small]
    amp-ir explain bert1 [--module "*.attention"] [--amp-dtype bfloat16] [--html plan.html]
    amp-ir profile bert1|train.py [--device cpu] [--amp-dtype bfloat16] [--trace trace.json]
                                  [--json profile.json]
    amp-ir report bert1|train.py [--device cpu] [--amp-dtype bfloat16] [--out report.html]
    amp-ir compile bert1|train.py [--target sm_90] [--amp-dtype bfloat16] [--out step.so]
                                  [--state state.npz] [--libraries cublaslt] [--dump-ir DIR]
    amp-ir verify bert1|train.py [--amp-dtype bfloat16] [--seeds 3] [--max-ratio 1.5]
                                 [--json FILE] [--html FILE]
    amp-ir cache info|clear|export FILE|import FILE

Exit codes: 0; 1 where `verify` finds a fault; 2 for a wrong use, with a sentence on stderr; 130
when interrupted.
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

import amp_ir
from amp_ir.api import lower
from amp_ir.compile_cache.commands import add_cache_arguments, manage_cache
from amp_ir.cuda.compiler import check_architecture
from amp_ir.demo.comparison import Report, compare
from amp_ir.demo.low_dtype import LOW_DTYPES, choose_low_dtype
from amp_ir.demo.stage_progress import spent, stages
from amp_ir.demo.table import comparison_table, footnote, summary
from amp_ir.demo.training_file import load_training
from amp_ir.demo.workloads import WORKLOADS, MissingPackage
from amp_ir.ir.stages import each, seconds_by_stage
from amp_ir.ir.target import parse_target, target_of, with_libraries
from amp_ir.report import explain as explain_report
from amp_ir.report.commands import (
    add_profile_arguments,
    add_report_arguments,
    add_training_arguments,
    show_profile,
    write_report,
)
from amp_ir.report.stage_files import current_stage_files, writing_stages
from amp_ir.report.wide_console import wide_console
from amp_ir.verification.commands import add_verify_arguments, run_verify
from amp_ir.vm.build import compile_executable, host_description
from amp_ir.vm.export import export_step, save_state

WRONG_USE = 2
INTERRUPTED = 130
_WRONG_USES = (
    amp_ir.errors.OptionError,
    amp_ir.errors.DeviceError,
    amp_ir.errors.BuildError,
    amp_ir.errors.FileFormatError,
    MissingPackage,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except _WRONG_USES as error:
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
    demo.add_argument("--device", default="cpu", help='where to train; "cpu" or "cuda"')
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
    export = commands.add_parser(
        "compile", help="write a step as a file that TVM's runtime runs, on this machine or another"
    )
    _add_compile_arguments(export)
    export.set_defaults(run=_compile)
    verify = commands.add_parser(
        "verify", help="compare a step's numbers with float64, with PyTorch and with its plan"
    )
    add_verify_arguments(verify, WORKLOADS)
    verify.set_defaults(run=run_verify)
    cache = commands.add_parser(
        "cache", help="look at the steps that are kept for later starts, remove or move them"
    )
    add_cache_arguments(cache)
    cache.set_defaults(run=manage_cache)
    return parser


def _add_compile_arguments(parser: argparse.ArgumentParser) -> None:
    add_training_arguments(parser, WORKLOADS)
    parser.add_argument(
        "--target", default="cpu", help='"cpu" (this one), or a GPU\'s architecture: "sm_90"'
    )
    parser.add_argument(
        "--out", type=Path, default=Path("step.so"), metavar="FILE", help="the file to write"
    )
    parser.add_argument(
        "--dump-ir",
        type=Path,
        metavar="DIR",
        help="also write the program after every stage there, a text file each",
    )
    parser.add_argument(
        "--state",
        type=Path,
        metavar="FILE.npz",
        help="also write parameters, buffers and optimizer state, as they are, for numpy",
    )
    parser.add_argument(
        "--libraries",
        metavar="NAMES",
        help='those that heavy ops may go to, the preferred one first, or "none"; default: '
        "onednn,torch for a CPU, cublaslt,torch_cuda for a GPU",
    )


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
    with contextlib.suppress(AttributeError, OSError):
        # Our own threads are part of the load; more than them belong to other processes.
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
        machine=_machine(arguments.device),
        out=arguments.out,
    )


def _compile(arguments: argparse.Namespace) -> int:
    """Compile without a GPU and without the libraries of the step; see `amp_ir.vm.export`."""
    target = with_libraries(parse_target(arguments.target), arguments.libraries)
    # Checked before anything that takes long.
    if target.is_cuda:
        check_architecture(target.arch)
    for option, file in (("out", arguments.out), ("state", arguments.state)):
        if file is not None and not file.parent.is_dir():
            raise amp_ir.errors.OptionError(f"--{option}={file}: there is no such folder; make it")
    seconds: dict[str, float] = {}
    with stages() as report, writing_stages(arguments.dump_ir):
        training = _training(arguments, report)
        report("capturing the step")
        with spent(seconds, "capture"):
            mod, args = _traced(training)
        if arguments.amp_dtype != "float32":
            report("choosing casts")
            with spent(seconds, "amp"):
                mod = amp_ir.autocast(mod, args, amp_dtype=arguments.amp_dtype)
        report("compiling")
        # The program that runs the file checks the indices of a batch on the host.
        on_stage = each(seconds_by_stage(seconds), current_stage_files())
        planned = lower(mod, target=target, host_checks="batch", on_stage=on_stage)
        with spent(seconds, "vm"):
            executable = compile_executable(planned, target)
        with spent(seconds, "link"):
            exported = export_step(executable, planned, mod, target, arguments.out)
        if arguments.state is not None:
            save_state(mod, arguments.state)
    wide_console().print(exported.table(seconds), highlight=False)
    return 0


@attrs.frozen
class _Measured:
    name: str
    memory: amp_ir.MemoryReport
    profile: amp_ir.KernelProfile
    plan: amp_ir.CastPlan | None


def _measure(arguments: argparse.Namespace) -> _Measured:
    """Measure memory and time of the training on the command line, beside its float32 step."""
    # Checked before anything that takes long.
    target = target_of(arguments.device)
    with stages() as report:
        training = _training(arguments, report)
        report("capturing the step")
        mod, args = _traced(training)
        low, plan = mod, None
        if arguments.amp_dtype != "float32":
            report("choosing casts")
            low = amp_ir.autocast(mod, args, amp_dtype=arguments.amp_dtype)
            plan = amp_ir.explain_plan(low)
        report("planning memory")
        baseline = mod if plan is not None else None
        memory = amp_ir.memory_report(low, args, baseline=baseline, device=str(target))
        report("compiling and timing")
        profile = amp_ir.profile_kernels(low, arguments.device, args, steps=arguments.steps)
    return _Measured(arguments.training, memory, profile, plan)


def _machine(device: str) -> str:
    return host_description() if device == "cpu" else torch.cuda.get_device_name(device)


def _training(arguments: argparse.Namespace, report: Report) -> Any:
    """Return the training on the command line: a workload, or a file of the user's."""
    name = arguments.training
    report("building", name)
    if name in WORKLOADS:
        device = getattr(arguments, "device", "cpu")
        return WORKLOADS[name].make(small=arguments.small, device=device)
    return load_training(Path(name))


def _traced(training: Any) -> tuple[amp_ir.StepModule, tuple[Any, ...]]:
    return amp_ir.trace_step(
        training.step,
        training.batch,
        model=training.model,
        optimizer=training.optimizer,
        scaler=getattr(training, "scaler", None),
    )
