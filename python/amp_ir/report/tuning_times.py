# SPDX-License-Identifier: Apache-2.0
"""What `amp_ir.tune` measured, as a table."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import attrs
from rich.console import Console
from rich.table import Table

from amp_ir.ir.tuning_cache import RULES, WAYS, Milliseconds, best_way

_WIDTH = 110


@attrs.frozen
class MatmulTimes:
    """Milliseconds of each of a step's matmuls by the way in which it is computed.

    `by_matmul` goes from a matmul ("512 x 4096 x 4096, bfloat16 to float32, a transposed") to the
    times of the ways it has; "rules" is what is done without measuring. `file` keeps them, if any.
    """

    by_matmul: Mapping[str, Milliseconds]
    file: Path | None

    @property
    def saved_share(self) -> float:
        """The share of the matmuls' time, each counted once, that the best ways save."""
        before = sum(times[RULES] for times in self.by_matmul.values())
        after = sum(times[best_way(times)] for times in self.by_matmul.values())
        return 1 - after / before if before else 0.0

    def __str__(self) -> str:
        """A row a matmul, the longest first."""
        if not self.by_matmul:
            return "oneDNN computes no matmul of this step"
        table = Table(box=None, pad_edge=False)
        table.add_column("milliseconds of rows x sum x columns", overflow="fold")
        for way in (*WAYS, "taken"):
            table.add_column(way, justify="right")
        ordered = sorted(self.by_matmul.items(), key=lambda one: -one[1][RULES])
        for name, times in ordered:
            figures = [f"{times[way]:.3g}" if way in times else "-" for way in WAYS]
            table.add_row(name, *figures, best_way(times))
        console = Console(width=_WIDTH, file=io.StringIO(), highlight=False)
        console.print(table)
        text = console.file.getvalue().rstrip()  # type: ignore[attr-defined]
        saved = f"{text}\n\nThe best ways save {self.saved_share:.1%} of these matmuls' time, each "
        if self.file is None:
            return f"{saved}counted once. They are not kept: there is no cache directory"
        return (
            f"{saved}counted once. Steps compiled from now on\ntake them. To forget them, delete\n"
            f"{self.file}"
        )
