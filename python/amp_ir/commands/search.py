# SPDX-License-Identifier: Apache-2.0
"""`amp-ir search`: the cheapest cast plan whose gradient error is within a budget."""

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
from amp_ir.verification.precision_search import OBJECTIVES

ONLY_FLOAT32 = 1


def add_search(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "search",
        SUMMARIES["search"],
        "bert1 --small --max-error 3e-3",
        "train.py --max-error 5e-3 --out plan.json",
        "train.py --amp-dtype float16 --max-error 1e-3 --objective memory",
    )
    parser.add_argument(
        "--max-error", type=float, required=True, metavar="E",
        help="the largest relative error of all gradients together, against float64",
    )  # fmt: skip
    parser.add_argument("--amp-dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument(
        "--objective", choices=OBJECTIVES, default="time",
        help="what to make small: the time, estimated and then measured, or the planned peak",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=300.0, metavar="S", help="when to stop (default 300)"
    )
    parser.add_argument(
        "--no-measure", action="store_true",
        help="let the estimate decide; by default the best plans are compiled and timed in turns",
    )  # fmt: skip
    parser.add_argument(
        "--gpu", choices=tuple(GPUS), help="estimate for a GPU by its published peaks"
    )
    parser.add_argument("--tf32", action="store_true", help="the GPU's float32 matmuls use TF32")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the plan")
    parser.add_argument("--json", type=Path, metavar="FILE", help="what was given back, all of it")
    parser.set_defaults(run=_search)


def _search(arguments: argparse.Namespace) -> int:
    with stages() as report:
        training = training_of(arguments, report)
        report("capturing the step")
        mod, args = traced(training)
    found = amp_ir.search_precision(
        mod,
        args,
        max_error=arguments.max_error,
        objective=arguments.objective,
        amp_dtype=arguments.amp_dtype,
        batches=getattr(training, "batches", ()),
        seconds=arguments.seconds,
        measure=not arguments.no_measure,
        gpu=arguments.gpu,
        allow_tf32=arguments.tf32,
    )
    print(found)
    warning = load_warning()
    if arguments.gpu is None and warning:
        print(warning, file=sys.stderr)
    if found.overrides:
        print(f'For jit and autocast:\npolicy="{found.policy}", overrides=[')
        print("\n".join(f"    amp_ir.{one}," for one in found.overrides) + "\n]")
    if arguments.out is not None and found.plan is not None:
        found.plan.save(arguments.out)
        print(f"wrote {arguments.out}")
    elif arguments.out is not None:
        print(f"{arguments.out} was not written: a step in float32 has no plan")
    if arguments.json is not None:
        write_text(arguments.json, found.to_json())
        print(f"wrote {arguments.json}")
    return 0 if found.plan is not None else ONLY_FLOAT32
