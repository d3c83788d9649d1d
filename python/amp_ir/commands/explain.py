# SPDX-License-Identifier: Apache-2.0
"""`amp-ir explain`: where a step uses which dtype, and why."""

from __future__ import annotations

import argparse
from typing import Any

import amp_ir
from amp_ir.commands import SUMMARIES
from amp_ir.commands.training import add_command, traced, training_of
from amp_ir.demo.stage_progress import stages
from amp_ir.report import explain


def add_explain(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "explain",
        SUMMARIES["explain"],
        'bert1 --module "*.attention"',
        "train.py --html plan.html --graph graph.html",
    )
    parser.add_argument("--amp-dtype", choices=("bfloat16", "float16"), default="bfloat16")
    explain.add_arguments(parser)
    parser.set_defaults(run=_explain)


def _explain(arguments: argparse.Namespace) -> int:
    with stages() as report:
        training = training_of(arguments, report)
        report("capturing the step")
        mod, args = traced(training)
        report("choosing casts")
        plan = amp_ir.explain_plan(amp_ir.autocast(mod, args, amp_dtype=arguments.amp_dtype))
    return explain.show(plan, arguments)
