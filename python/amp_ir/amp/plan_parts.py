# SPDX-License-Identifier: Apache-2.0
"""The parts of a CastPlan: the ops of a step outside of its loops, and the body of each loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from amp_ir.amp.plan import CastPlan, PlannedOp


@attrs.frozen
class Part:
    """The ops of a step outside of its loops, or the body of one, which is run `length` times."""

    plan: CastPlan
    length: int = 1
    loop: PlannedOp | None = None

    @property
    def where(self) -> str:
        """Say in which loop it is; "" outside of loops."""
        if self.loop is None:
            return ""
        return f", in each of {self.length} steps of {self.loop.variable}"

    @property
    def alone_nbytes(self) -> int:
        """Return the bytes that its casts move by themselves, in all steps."""
        return self.length * sum(cast.nbytes for cast in self.plan.casts)


def parts_of(plan: CastPlan) -> list[Part]:
    """Return the ops outside of loops, and the body of each loop."""
    inner = [Part(one.plan, one.length, plan.ops[one.id]) for one in plan.loops]
    return [Part(plan), *inner]
