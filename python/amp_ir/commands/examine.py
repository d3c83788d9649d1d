# SPDX-License-Identifier: Apache-2.0
"""`amp-ir examine`: what of a step is compiled, what is PyTorch's own op, what is refused."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import amp_ir
from amp_ir.commands import SUMMARIES
from amp_ir.commands.training import add_command, owners, training_of
from amp_ir.demo.stage_progress import stages
from amp_ir.files.atomic_file import write_text
from amp_ir.report.wide_console import wide_console

REFUSED = 1


def add_examine(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "examine",
        SUMMARIES["examine"],
        "train.py",
        "bert1 --small --json examination.json",
        "train.py --issue issue.md",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="all of it, for programs")
    parser.add_argument("--issue", type=Path, metavar="FILE", help="a text for an issue report")
    parser.add_argument("--all", action="store_true", help="every kind of op, also what moves data")
    parser.set_defaults(run=_examine)


def _examine(arguments: argparse.Namespace) -> int:
    with stages() as report:
        training = training_of(arguments, report)
        report("capturing the step")
        found = amp_ir.examine(training.step, training.batch, **owners(training))
    console = wide_console()
    found.show(console, everything=arguments.all)
    for file, text in ((arguments.json, found.to_json()), (arguments.issue, found.issue_text())):
        if file is not None:
            write_text(file, text)
            console.print(f"wrote {file}", highlight=False)
    return REFUSED if found.refused else 0
