# SPDX-License-Identifier: Apache-2.0
"""`amp-ir errors`: how much of the gradients' error each op and each cast makes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import amp_ir
from amp_ir.commands import SUMMARIES
from amp_ir.commands.training import add_casts, add_command, casts_of, owners, training_of
from amp_ir.demo.stage_progress import stages
from amp_ir.files.atomic_file import write_text


def add_errors(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "errors",
        SUMMARIES["errors"],
        "bert1 --small",
        "train.py --html errors.html",
    )
    add_casts(parser, low_only=True)
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="when to stop (default 60)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="all of it, for programs")
    parser.add_argument("--html", type=Path, metavar="FILE", help="all of it, as one page")
    parser.set_defaults(run=_errors)


def _errors(arguments: argparse.Namespace) -> int:
    casts = casts_of(arguments)
    with stages() as report:
        training = training_of(arguments, report)
        report("rounding ops one after the other")
        found = amp_ir.error_report(
            training.step,
            training.batch,
            **casts,
            seconds=arguments.seconds,
            **owners(training),
        )
    print(found)
    for file, text in ((arguments.json, found.to_json), (arguments.html, found.to_html)):
        if file is not None:
            write_text(file, text())
            print(f"wrote {file}")
    return 0
