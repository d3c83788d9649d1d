# SPDX-License-Identifier: Apache-2.0
"""The names that a benchmark is called with."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable


def check_names(
    parser: argparse.ArgumentParser, chosen: Iterable[str], known: Collection[str], kind: str
) -> None:
    """End the program with the unknown names, before anything is measured."""
    unknown = [one for one in chosen if one not in known]
    if unknown:
        parser.error(f"no {kind} {', '.join(map(repr, unknown))}; there are {', '.join(known)}")
