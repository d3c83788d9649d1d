# SPDX-License-Identifier: Apache-2.0
"""`amp-ir profile` and `amp-ir report`: their arguments and output."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from amp_ir.files.atomic_file import write_text
from amp_ir.files.strict_json import strict_json
from amp_ir.report.kernel_profile import KernelProfile
from amp_ir.report.kernel_table import rounded
from amp_ir.report.memory import MemoryReport
from amp_ir.report.step_page import RoundingErrors, step_page
from amp_ir.report.wide_console import wide_console


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `amp-ir profile`."""
    _add_run_arguments(parser)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="for ui.perfetto.dev")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the profile and the memory")


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `amp-ir report`."""
    _add_run_arguments(parser)
    parser.add_argument(
        "--out", "--html", type=Path, default=Path("report.html"), metavar="FILE",
        help="the page to write",
    )  # fmt: skip
    parser.add_argument(
        "--errors", type=float, default=0.0, metavar="S",
        help="measure for so many seconds whose rounding makes the gradients' error (default none)",
    )  # fmt: skip


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        default="cpu",
        help='where to run; "cpu" or "cuda" (a file of yours puts its model there itself)',
    )
    parser.add_argument(
        "--steps", type=int, default=10, metavar="N", help="timed steps (default 10)"
    )
    parser.add_argument(
        "--no-peers",
        action="store_true",
        help="do not time the float32 step and PyTorch's beside it",
    )


def show_profile(
    profile: KernelProfile,
    memory: MemoryReport,
    arguments: argparse.Namespace,
    console: Console | None = None,
    *,
    peers: Mapping[str, float] | None = None,
) -> int:
    """Print the table by kernel and the memory in a line; write the requested files.

    `peers` are milliseconds of a step by who ran it, this step first.
    """
    console = console or wide_console()
    console.print(profile)
    if peers:
        times = ", ".join(f"{name} {rounded(spent)}" for name, spent in peers.items())
        console.print(f"milliseconds a step, in turns: {times}", highlight=False)
    console.print()
    console.print(memory.headline(), highlight=False, markup=False)
    if memory.balance is not None:
        console.print(str(memory.balance), highlight=False)
    if arguments.trace is not None:
        profile.save_trace(arguments.trace)
        console.print(f"wrote {arguments.trace}", highlight=False)
    if arguments.json is not None:
        parts = {
            "profile": json.loads(profile.to_json()),
            "memory": json.loads(memory.to_json()),
        }
        write_text(arguments.json, strict_json(parts) + "\n")
        console.print(f"wrote {arguments.json}", highlight=False)
    return 0


def write_report(
    title: str,
    profile: KernelProfile,
    memory: MemoryReport,
    plan: Any,
    *,
    machine: str,
    out: Path,
    peers: Mapping[str, float] | None = None,
    errors: RoundingErrors | None = None,
    doubt: str = "",
) -> int:
    """Write the page, with `peers` as in `show_profile`, and print its path."""
    write_text(out, step_page(title, memory, profile, plan, machine, peers, errors, doubt))
    wide_console().print(f"wrote {out}", highlight=False)
    return 0
