# SPDX-License-Identifier: Apache-2.0
"""Where every tensor of a step lies in memory."""

from __future__ import annotations

import attrs
import tvm


@attrs.frozen
class Interval:
    """One value's stay in the arena; positions of calls, both inclusive."""

    name: str
    nbytes: int
    first_use: int
    last_use: int
    offset_bytes: int
    dtype: str
    span: tvm.ir.Span | None = attrs.field(default=None, repr=False)


@attrs.frozen
class MemoryPlan:
    """Where everything lies: `arena_bytes` for intermediates, state and results apart from it.

    `lower_bound_bytes` is the largest sum of bytes alive at once: no plan of this order is smaller.
    """

    arena_bytes: int
    lower_bound_bytes: int
    intervals: tuple[Interval, ...]
    state_bytes: int
    batch_bytes: int
    result_bytes: int

    @property
    def peak_bytes(self) -> int:
        """All bytes that a step needs: state, batch, results and the arena."""
        return self.arena_bytes + self.state_bytes + self.batch_bytes + self.result_bytes


@attrs.frozen
class PlannedStep:
    """IR whose memory is fixed, and the plan it follows.

    `ir` has `main(arena, inputs..., results...)`: all tensors flat and of physical dtype
    (bfloat16 as uint16, bool as uint8); it returns nothing and writes state inputs in place.
    """

    ir: tvm.IRModule
    plan: MemoryPlan
