# SPDX-License-Identifier: Apache-2.0
"""`amp-ir cache`: the compile cache on this machine."""

from __future__ import annotations

from typing import Any

from amp_ir.commands import SUMMARIES
from amp_ir.compile_cache.commands import add_cache_arguments, manage_cache


def add_cache(commands: Any) -> None:
    """Add the command with its actions."""
    parser = commands.add_parser("cache", help=SUMMARIES["cache"])
    add_cache_arguments(parser)
    parser.set_defaults(run=manage_cache)
