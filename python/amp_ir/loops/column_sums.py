# SPDX-License-Identifier: Apache-2.0
"""Running values of reductions over the rows of a CPU kernel: one a column."""

from __future__ import annotations

from typing import Any

import attrs
from tvm import tirx

from amp_ir.loops import math as m
from amp_ir.loops.accumulators import Running, gathers_roundings, over, wide_dtype
from amp_ir.loops.ir import Reduction, compute_dtype
from amp_ir.loops.statements import sequence


@attrs.frozen(eq=False)
class ColumnSums:
    """A reduction over rows: for each part of the rows, one running value a column.

    Rows are added to `sums`. At the end of a block of rows, `kept` takes what they hold; where a
    part is no longer than a block, the two may be the same. `part` is the one at work.
    """

    value: Reduction
    sums: Running
    kept: Running
    parts: int
    extent: int
    part: Any

    @classmethod
    def declare(
        cls, value: Reduction, place: tuple[int, Any], extent: int, *, is_long: bool
    ) -> ColumnSums:
        """Memory for `extent` columns; `place` is how many parts there are, and the one at work."""
        (parts, part), kind, dtype = place, value.kind, compute_dtype(value.dtype)
        sums = kept = Running.declare(kind, dtype, parts * extent, "sums")
        if is_long and gathers_roundings(value):
            kept = Running.declare(kind, wide_dtype(kind, dtype), parts * extent, "kept")
        return cls(value, sums, kept, parts, extent, part)

    @property
    def has_blocks(self) -> bool:
        """Whether rows are added in blocks."""
        return self.kept is not self.sums

    def without_sums(self) -> ColumnSums:
        """The same, to which tiles are added and not rows."""
        return attrs.evolve(self, sums=self.kept)

    @property
    def buffers(self) -> list[Running]:
        """Its memory."""
        return [self.sums, self.kept] if self.has_blocks else [self.kept]

    def clear(self, column: Any) -> tirx.Stmt:
        """Start this part's value of a column."""
        return sequence([one.start(self._here(column)) for one in self.buffers])

    def add(self, column: Any, element: Any) -> tirx.Stmt:
        """Take an element into the running value of a column."""
        return self.sums.add(self._here(column), element)

    def flush(self, column: Any) -> tirx.Stmt:
        """End a block in a column."""
        return self.sums.flush(self.kept, self._here(column))

    def fold(self, column: Any) -> list[tirx.Stmt]:
        """Combine the parts of a column, in order, where those of the first part are.

        Step by step in memory: as one expression a maximum, which reads its arguments three times,
        would be written out three to the power of the parts.
        """
        kept, extent = self.kept, self.extent
        return [kept.add(column, kept.at(part * extent + column)) for part in range(1, self.parts)]

    def total(self, column: Any) -> Any:
        """The finished value of a column, after `fold`."""
        return m.cast(self.kept.at(column), compute_dtype(self.value.dtype))

    def _here(self, column: Any) -> Any:
        return self.part * self.extent + column


@attrs.frozen(eq=False)
class TileSums:
    """The running values of a tile, some columns from `start` on, small enough for registers.

    `sums` take the rows of a block, `blocks` what they hold at its end, and `whole` all that.
    """

    whole: ColumnSums
    sums: Running
    blocks: Running
    start: Any

    @classmethod
    def declare(cls, whole: ColumnSums, start: Any, width: int, *, is_long: bool) -> TileSums:
        """For `width` columns; of one block of rows unless it `is_long`."""
        kind, dtype = whole.value.kind, compute_dtype(whole.value.dtype)
        sums = blocks = Running.declare(kind, dtype, width, "sums")
        if is_long and gathers_roundings(whole.value):
            blocks = Running.declare(kind, dtype, width, "blocks")
        return cls(whole, sums, blocks, start)

    @property
    def value(self) -> Reduction:
        """What is reduced."""
        return self.whole.value

    def begin(self) -> list[tirx.Stmt]:
        """Make the registers and start them."""
        made = [self.sums] if self.blocks is self.sums else [self.sums, self.blocks]
        return [*(one.allocation() for one in made), *(over(one.count, one.start) for one in made)]

    def add(self, column: Any, element: Any) -> tirx.Stmt:
        """Take an element into the running value of a column."""
        return self.sums.add(column - self.start, element)

    def end_block(self) -> list[tirx.Stmt]:
        """End a block of rows."""
        if self.blocks is self.sums:
            return []
        return [over(self.sums.count, lambda at: self.sums.flush(self.blocks, at))]

    def end(self, column: Any) -> tirx.Stmt:
        """End the tile in a column."""
        return self.whole.add(column, self.blocks.at(column - self.start))
