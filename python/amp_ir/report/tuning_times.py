# SPDX-License-Identifier: Apache-2.0
"""The measurements of `amp_ir.tune` as a table."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import attrs
from rich.console import Console
from rich.table import Table

from amp_ir.ir.library_call import RULES
from amp_ir.ir.tuning_cache import ALGORITHMS, Milliseconds, fastest_algorithm

_WIDTH = 110


@attrs.frozen
class MatmulTimes:
    """Milliseconds of each of a step's matmuls by algorithm.

    `by_matmul` goes from a matmul ("512 x 4096 x 4096, bfloat16 to float32, a transposed") to the
    times of its algorithms; "rules" is the choice without measurements. `file` stores them, if any.
    """

    by_matmul: Mapping[str, Milliseconds]
    file: Path | None

    @property
    def saved_share(self) -> float:
        """Return the saved share of the matmuls' time, each counted once."""
        before = sum(times[RULES] for times in self.by_matmul.values())
        after = sum(times[fastest_algorithm(times)] for times in self.by_matmul.values())
        return 1 - after / before if before else 0.0

    def __str__(self) -> str:
        """Return one row per matmul, the longest first."""
        if not self.by_matmul:
            return "oneDNN computes no matmul of this step"
        table = Table(box=None, pad_edge=False)
        table.add_column("milliseconds of rows x sum x columns", overflow="fold")
        for algorithm in (*ALGORITHMS, "taken"):
            table.add_column(algorithm, justify="right")
        ordered = sorted(self.by_matmul.items(), key=lambda one: -one[1][RULES])
        for name, times in ordered:
            figures = [
                f"{times[algorithm]:.3g}" if algorithm in times else "-" for algorithm in ALGORITHMS
            ]
            table.add_row(name, *figures, fastest_algorithm(times))
        console = Console(width=_WIDTH, file=io.StringIO(), highlight=False)
        console.print(table)
        text = console.file.getvalue().rstrip()  # type: ignore[attr-defined]
        share = f"{self.saved_share:.1%}"
        saved = f"{text}\n\nThe fastest algorithms save {share} of these matmuls' time, each "
        if self.file is None:
            return f"{saved}counted once. They are not kept: there is no cache directory"
        return (
            f"{saved}counted once. Steps compiled from now on\ntake them. To forget them, delete\n"
            f"{self.file}"
        )
