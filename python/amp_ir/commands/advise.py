# SPDX-License-Identifier: Apache-2.0
"""`amp-ir advise`: what mixed precision is expected to gain, before any training."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import amp_ir
from amp_ir.commands import SUMMARIES
from amp_ir.commands.training import add_command, traced, training_of
from amp_ir.demo.stage_progress import stages
from amp_ir.files.atomic_file import write_text
from amp_ir.host.machine_load import load_warning
from amp_ir.host.machine_model import GPUS


def add_advise(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "advise",
        SUMMARIES["advise"],
        "bert1",
        "train.py --gpu H100 --amp-dtype float16",
    )
    parser.add_argument("--amp-dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument(
        "--gpu", choices=tuple(GPUS), help="a GPU by its published peaks; by default this CPU"
    )
    parser.add_argument("--tf32", action="store_true", help="the GPU's float32 matmuls use TF32")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all of it, for programs")
    parser.set_defaults(run=_advise)


def _advise(arguments: argparse.Namespace) -> int:
    with stages() as report:
        training = training_of(arguments, report)
        report("capturing the step")
        mod, args = traced(training)
        report("estimating")
        found = amp_ir.advise(
            mod,
            args,
            amp_dtype=arguments.amp_dtype,
            gpu=arguments.gpu,
            allow_tf32=arguments.tf32,
        )
    print(found)
    warning = load_warning()
    if arguments.gpu is None and warning:
        print(warning, file=sys.stderr)
    if arguments.json is not None:
        write_text(arguments.json, found.to_json())
        print(f"wrote {arguments.json}")
    return 0
