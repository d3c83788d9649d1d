# SPDX-License-Identifier: Apache-2.0
"""`amp-ir doctor`: what of this machine amp_ir uses, and what is wrong with it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from amp_ir.commands import SUMMARIES
from amp_ir.commands.training import add_command
from amp_ir.files.atomic_file import write_text
from amp_ir.verification.doctor import diagnose


def add_doctor(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "doctor",
        SUMMARIES["doctor"],
        "",
        "--json doctor.json",
        has_training=False,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="all of it, for programs")
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    found = diagnose()
    print(found)
    if arguments.json is not None:
        write_text(arguments.json, found.to_json())
        print(f"wrote {arguments.json}")
    return 0 if found.is_good else 1
