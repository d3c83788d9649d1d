# SPDX-License-Identifier: Apache-2.0
"""`amp-ir verify`: a step's numbers beside float64, PyTorch and its own plan."""

from __future__ import annotations

import argparse
from typing import Any

from amp_ir.commands import SUMMARIES
from amp_ir.commands.training import add_casts, add_command, casts_of
from amp_ir.verification.commands import add_verify_arguments, run_verify


def add_verify(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "verify",
        SUMMARIES["verify"],
        "bert1 --small",
        "train.py --seeds 3 --html verify.html",
    )
    add_casts(parser)
    add_verify_arguments(parser)
    parser.set_defaults(run=_verify)


def _verify(arguments: argparse.Namespace) -> int:
    return run_verify(arguments, casts_of(arguments))
