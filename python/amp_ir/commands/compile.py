# SPDX-License-Identifier: Apache-2.0
"""`amp-ir compile`: a step as a file that TVM's runtime runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import attrs

import amp_ir
from amp_ir.api import lower
from amp_ir.commands import SUMMARIES
from amp_ir.commands.training import add_casts, add_command, casts_of, traced, training_of
from amp_ir.cuda.compiler import check_architecture
from amp_ir.demo.stage_progress import spent, stages
from amp_ir.ir.stages import each, seconds_by_stage
from amp_ir.ir.target import parse_target, with_libraries
from amp_ir.report.stage_files import current_stage_files, writing_stages
from amp_ir.report.wide_console import wide_console
from amp_ir.vm.build import compile_executable
from amp_ir.vm.export import export_step, save_state


def add_compile(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "compile",
        SUMMARIES["compile"],
        "mlp --small --out step.so",
        "train.py --target sm_90 --out step.so --state state.npz",
    )
    add_casts(parser)
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
    parser.set_defaults(run=_compile)


def _compile(arguments: argparse.Namespace) -> int:
    """Compile without a GPU and without the libraries of the step; see `amp_ir.vm.export`."""
    target = with_libraries(parse_target(arguments.target), arguments.libraries)
    # What runs the file need not have PyTorch for what oneDNN can do.
    target = attrs.evolve(target, takes_fastest=False)
    # Checked before anything that takes long.
    casts = casts_of(arguments)
    if target.is_cuda:
        check_architecture(target.arch)
    seconds: dict[str, float] = {}
    with stages() as report, writing_stages(arguments.dump_ir):
        training = training_of(arguments, report)
        report("capturing the step")
        with spent(seconds, "capture"):
            mod, args = traced(training)
        if arguments.amp_dtype != "float32":
            report("choosing casts")
            with spent(seconds, "amp"):
                mod = amp_ir.autocast(mod, args, **casts)
        mod = mod.with_contiguous_state()
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
