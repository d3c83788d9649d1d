# SPDX-License-Identifier: Apache-2.0
"""Running values of reductions over the rows of a CPU kernel: one per column."""

from __future__ import annotations

from typing import Any

import attrs
from tvm import tirx

from amp_ir.loops import math as m
from amp_ir.loops.codegen.accumulate_blocks import COLUMN_BLOCK
from amp_ir.loops.codegen.accumulators import (
    Running,
    combine,
    needs_blocks,
    result_of,
    running_dtype,
    wide_dtype,
)
from amp_ir.loops.codegen.statements import sequence
from amp_ir.loops.ir import Reduction, compute_dtype


@attrs.frozen(eq=False)
class ColumnSums:
    """A reduction over rows: for each part of the rows, one running value per column.

    Rows are added to `sums`. At the end of a block of rows, `kept` takes their values; where a
    part is no longer than a block, the two may be the same buffer. `part` is the current part.
    """

    value: Reduction
    sums: Running
    kept: Running
    parts: int
    extent: int
    part: Any

    @classmethod
    def declare(
        cls, value: Reduction, place: tuple[int, Any], extent: int, rows: int
    ) -> ColumnSums:
        """Declare memory for `extent` columns of parts of `rows` rows.

        `place` is the number of parts and the current one. When there are few blocks, `kept` has
        the compute dtype: that moves fewer bytes at the end of each block.
        """
        (parts, part), kind, dtype = place, value.kind, compute_dtype(value.dtype)
        running = running_dtype(kind, dtype)
        sums = kept = Running.declare(kind, running, parts * extent, "sums")
        if rows > COLUMN_BLOCK and needs_blocks(value):
            kept_dtype = wide_dtype(kind, dtype) if rows > COLUMN_BLOCK * COLUMN_BLOCK else dtype
            kept = Running.declare(kind, kept_dtype, parts * extent, "kept")
        return cls(value, sums, kept, parts, extent, part)

    @property
    def has_blocks(self) -> bool:
        """Return whether rows are added in blocks."""
        return self.kept is not self.sums

    @property
    def buffers(self) -> list[Running]:
        """Return its memory."""
        return [self.sums, self.kept] if self.has_blocks else [self.kept]

    def clear(self, column: Any) -> tirx.Stmt:
        """Clear this part's value of a column."""
        return sequence([one.start(self._here(column)) for one in self.buffers])

    def add(self, column: Any, element: Any) -> tirx.Stmt:
        """Accumulate an element into the running value of a column."""
        return self.sums.add(self._here(column), element)

    def flush(self, column: Any) -> tirx.Stmt:
        """End a block in a column."""
        return self.sums.flush(self.kept, self._here(column))

    def fold(self, column: Any) -> list[tirx.Stmt]:
        """Combine the parts of a column, in order, into the first part.

        Each step goes through memory: as one expression a maximum, which reads its arguments three
        times, would grow to three to the power of the parts.
        """
        if needs_blocks(self.value):
            return []
        return [self.kept.add(column, self._of_part(part, column)) for part in range(1, self.parts)]

    def total(self, column: Any) -> Any:
        """Return the finished value of a column, after `fold`."""
        kind, dtype = self.value.kind, compute_dtype(self.value.dtype)
        total = self._of_part(0, column)
        if needs_blocks(self.value):
            wide = wide_dtype(kind, dtype)
            total = m.cast(total, wide)
            for part in range(1, self.parts):
                total = combine(kind, total, m.cast(self._of_part(part, column), wide))
        return result_of(self.value, total)

    def _of_part(self, part: int, column: Any) -> Any:
        return self.kept.at(part * self.extent + column if part else column)

    def _here(self, column: Any) -> Any:
        return self.part * self.extent + column
