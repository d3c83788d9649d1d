# SPDX-License-Identifier: Apache-2.0
"""Rows of a value that a kernel holds between its passes, instead of computing them again.

A softmax needs the exponential of an element twice, for the sum of its row and for the result; it
takes a dozen times as long as reading a float32 from the cache. So does an element that is read
from a column of memory or by an id, which a layer norm needs three times.
"""

from __future__ import annotations

from typing import Any

import attrs
from tvm import tirx

from amp_ir.loops.ir import Value, compute_dtype

# Columns up to which a row is held: a megabyte of float32 is in the second or third cache.
MOST_HELD = 1 << 18


@attrs.define(eq=False)
class HeldRow:
    """The elements of a value in one row: the pass that first needs them writes, later ones read.

    The memory is private to a thread: a few elements are on its stack, more in its workspace.
    """

    buffer: tirx.Var
    is_started: bool = False
    is_written: bool = False

    @classmethod
    def declare(cls, value: Value, columns: int) -> HeldRow:
        """Declare the memory of a row."""
        return cls(tirx.decl_buffer((columns,), compute_dtype(value.dtype), "held"))

    def allocation(self) -> tirx.Stmt:
        """Allocate the memory."""
        return tirx.AllocBuffer(self.buffer)

    def load(self, column: Any) -> Any:
        """Load an element, in a pass after the one that writes."""
        return tirx.BufferLoad(self.buffer, [column])

    def store(self, column: Any, element: Any) -> tirx.Stmt:
        """Store an element."""
        self.is_started = True
        return tirx.BufferStore(self.buffer, element, [column])

    def end_pass(self) -> None:
        """End a pass over the row: from now on the elements that it wrote are read."""
        self.is_written = self.is_started
