# SPDX-License-Identifier: Apache-2.0
"""`amp-ir explain`: where a step uses which dtype, and why."""

from __future__ import annotations

import argparse
from typing import Any

import amp_ir
from amp_ir.commands import SUMMARIES
from amp_ir.commands.training import add_casts, add_command, casts_of, traced, training_of
from amp_ir.demo.stage_progress import stages
from amp_ir.report import explain


def add_explain(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "explain",
        SUMMARIES["explain"],
        'bert1 --module "*.attention"',
        'train.py --override "module=head,to=float32"',
        "train.py --html plan.html --graph graph.html",
    )
    add_casts(parser, low_only=True)
    explain.add_arguments(parser)
    parser.set_defaults(run=_explain)


def _explain(arguments: argparse.Namespace) -> int:
    casts = casts_of(arguments)
    with stages() as report:
        training = training_of(arguments, report)
        report("capturing the step")
        mod, args = traced(training)
        report("choosing casts")
        plan = amp_ir.explain_plan(amp_ir.autocast(mod, args, **casts))
    return explain.show(plan, arguments)
