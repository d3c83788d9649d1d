# SPDX-License-Identifier: Apache-2.0
"""A memory plan as JSON: what running a program and explaining its failures needs."""

from __future__ import annotations

from typing import Any

import attrs

from amp_ir.ir.location import Location
from amp_ir.ir.memory_plan import MemoryPlan, PlannedCall, StateWrites

_NUMBERS = (
    "arena_bytes", "lower_bound_bytes", "state_bytes", "batch_bytes", "result_bytes",
    "library_bytes",
)  # fmt: skip


def plan_to_json(plan: MemoryPlan) -> dict[str, Any]:
    """Return the plan without its live intervals, which only reports read."""
    numbers = {name: getattr(plan, name) for name in _NUMBERS}
    calls = [attrs.asdict(call) for call in plan.calls]
    return {**numbers, "calls": calls, "writes": attrs.asdict(plan.writes)}


def plan_from_json(data: dict[str, Any]) -> MemoryPlan:
    """Return the plan that `plan_to_json` described."""
    calls = [
        PlannedCall(
            **{
                **call,
                "ops": tuple(call["ops"]),
                "locations": tuple(Location(**one) for one in call["locations"]),
            }
        )
        for call in data["calls"]
    ]
    writes = StateWrites(**{**data["writes"], "kept": tuple(data["writes"]["kept"])})
    numbers = {name: data[name] for name in _NUMBERS}
    return MemoryPlan(**numbers, intervals=(), calls=tuple(calls), writes=writes)
