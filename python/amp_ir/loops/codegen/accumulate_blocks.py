# SPDX-License-Identifier: Apache-2.0
"""Blocked summation: where the loops of a long reduction are cut into blocks.

A float32 running value that takes n elements one by one has an error of up to n roundings of its
value. Here it takes a block of elements and is then added to a wider value (float64), whose
roundings are negligible beside those of float32: the error stays that of one block, however long
the sum is (Higham 1993). PyTorch's sums have blocks of 16, at several levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from tvm import tirx
from tvm.tirx import For, ForKind

from amp_ir.ir.row_loops import BLOCKS
from amp_ir.loops.codegen.statements import sequence

# Elements that one running value takes before it is added to a wider one. For equal numbers, whose
# errors all have the same sign, 8 are off by 6e-8 of their sum, half a unit in the last place; 16
# by twice that.
BLOCK = 8
# The same where running values are in memory, one per column, and the end of a block costs time.
COLUMN_BLOCK = 16


@attrs.frozen
class Cut:
    """Position of the cut among nested loops, and the number of iterations in a block."""

    level: int
    size: int


def cut_of(extents: Sequence[int], most: int) -> Cut | None:
    """Return where to cut loops, outermost first, into blocks of `most` innermost iterations.

    None when the loops have no more iterations than that.
    """
    inner = 1
    for level in reversed(range(len(extents))):
        if inner * extents[level] > most:
            return Cut(level, _block_size(extents[level], most // inner))
        inner *= extents[level]
    return None


def _block_size(extent: int, most: int) -> int:
    """Return `most`, or slightly less where that divides the loop and makes all blocks equal."""
    divisors = (size for size in range(most, most // 2, -1) if extent % size == 0)
    return next(divisors, most)


@attrs.define(eq=False)
class Loop:
    """A loop of `extent` iterations, of which the first `count` run (None: all of them).

    `size`: the length of its blocks; None when the loop is not cut.
    """

    name: str
    extent: int
    count: Any = None
    size: int | None = None
    outer: tirx.Var = attrs.field(init=False)
    inner: tirx.Var = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.inner = tirx.Var(self.name, "int32")
        self.outer = tirx.Var(self.name + BLOCKS, "int32")

    @property
    def at(self) -> Any:
        """Return the current iteration."""
        return self.inner if self.size is None else self.outer * self.size + self.inner

    def cut(self, most: int) -> Loop:
        """Return the loop cut into blocks of at most `most` iterations."""
        return attrs.evolve(self, size=_block_size(self.extent, min(most, self.extent)))

    def around(self, body: Sequence[tirx.Stmt], flush: Sequence[tirx.Stmt] = ()) -> tirx.Stmt:
        """Wrap `body` in the loop; each block ends with `flush`."""
        count: Any = self.extent if self.count is None else self.count
        if self.size is None:
            return For(self.inner, 0, count, ForKind.SERIAL, sequence(body))
        is_whole = self.count is None and self.extent % self.size == 0
        size = self.size if is_whole else tirx.min(count - self.outer * self.size, self.size)
        block = For(self.inner, 0, size, ForKind.SERIAL, sequence(body))
        blocks = -(-self.extent // self.size)
        return For(self.outer, 0, blocks, ForKind.SERIAL, sequence([block, *flush]))


def nested(names: Sequence[str], extents: Sequence[int], block: int | None) -> list[Loop]:
    """Return nested loops, outermost first; one loop of a long sum is cut into blocks."""
    loops = [Loop(name, extent) for name, extent in zip(names, extents, strict=True)]
    cut = cut_of(extents, block) if block is not None else None
    if cut is not None:
        loops[cut.level] = loops[cut.level].cut(cut.size)
    return loops
