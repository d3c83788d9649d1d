# SPDX-License-Identifier: Apache-2.0
"""What a built step is beside its IR: the part of a file that lets it run without lowering."""

from __future__ import annotations

from typing import Any

import attrs

from amp_ir.ir.dispatch_log import DispatchNote
from amp_ir.ir.memory_plan import MemoryPlan
from amp_ir.ir.plan_record import plan_from_json, plan_to_json


@attrs.frozen
class BuiltStep:
    """Machine code as a shared library, with the virtual machine's program, and its plan."""

    library: bytes = attrs.field(repr=False)
    plan: MemoryPlan
    kernel_count: int
    dispatched: tuple[DispatchNote, ...] = ()

    def describe(self) -> dict[str, Any]:
        """Return all but the library as what JSON holds."""
        return {
            "kernel_count": self.kernel_count,
            "memory": plan_to_json(self.plan),
            "dispatched": [attrs.astuple(one) for one in self.dispatched],
        }

    @classmethod
    def read(cls, description: dict[str, Any], library: bytes) -> BuiltStep:
        """Return the step that `describe` described, with its library."""
        return cls(
            library,
            plan_from_json(description["memory"]),
            int(description["kernel_count"]),
            tuple(DispatchNote(*one) for one in description["dispatched"]),
        )
