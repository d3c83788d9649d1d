# SPDX-License-Identifier: Apache-2.0
"""`amp-ir verify`: a step's numbers beside float64, PyTorch and its own plan."""

from __future__ import annotations

from typing import Any

from amp_ir.commands import SUMMARIES
from amp_ir.commands.training import add_command, add_dtype
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
    add_dtype(parser)
    add_verify_arguments(parser)
    parser.set_defaults(run=run_verify)
