# SPDX-License-Identifier: Apache-2.0
"""A memory plan as JSON, and back."""

from __future__ import annotations

from typing import Any

import attrs

from amp_ir.ir.location import Location, join_spans, locations_of, to_span
from amp_ir.ir.memory_plan import (
    ChunkedLoss,
    Interval,
    MemoryPlan,
    MemoryRole,
    PlannedCall,
    PlannedValue,
    Recomputation,
    StateWrites,
)

_NUMBERS = (
    "arena_bytes", "lower_bound_bytes", "state_bytes", "batch_bytes", "result_bytes",
    "library_bytes",
)  # fmt: skip


def plan_to_json(plan: MemoryPlan) -> dict[str, Any]:
    """Return the whole plan as what JSON holds; each location is there once."""
    places = _Places()
    return {
        **{name: getattr(plan, name) for name in _NUMBERS},
        "intervals": [
            _row(one, span=[places.number(place) for place in locations_of(one.span)])
            for one in plan.intervals
        ],
        "values": [
            _row(one, role=one.role.value, location=places.number(one.location))
            for one in plan.values
        ],
        "calls": [
            _row(one, locations=[places.number(place) for place in one.locations])
            for one in plan.calls
        ],
        "chunked_losses": [
            _row(one, location=places.number(one.location)) for one in plan.chunked_losses
        ],
        "writes": attrs.asdict(plan.writes),
        "recomputed": None if plan.recomputed is None else attrs.asdict(plan.recomputed),
        "locations": [_row(one) for one in places.found],
    }


def plan_from_json(data: dict[str, Any]) -> MemoryPlan:
    """Return the plan that `plan_to_json` described."""
    places = [Location(*one) for one in data["locations"]]
    at = places.__getitem__
    recomputed = data.get("recomputed")  # a file of amp_ir 0.1 does not say
    return MemoryPlan(
        **{name: data[name] for name in _NUMBERS},
        intervals=tuple(
            Interval(*[*numbers, join_spans(to_span(at(number)) for number in span)])
            for *numbers, span in data["intervals"]
        ),
        values=tuple(
            PlannedValue(name, op, at(place), MemoryRole(role), *numbers)
            for name, op, place, role, *numbers in data["values"]
        ),
        calls=tuple(
            PlannedCall(name, symbol, tuple(ops), tuple(map(at, found)), *rest)
            for name, symbol, ops, found, *rest in data["calls"]
        ),
        chunked_losses=tuple(
            ChunkedLoss(at(place), *numbers) for place, *numbers in data["chunked_losses"]
        ),
        writes=StateWrites(**{**data["writes"], "kept": tuple(data["writes"]["kept"])}),
        recomputed=None if recomputed is None else Recomputation(**recomputed),
    )


class _Places:
    """Locations, numbered in the order in which they are found."""

    def __init__(self) -> None:
        self._numbers: dict[Location, int] = {}

    def number(self, place: Location) -> int:
        return self._numbers.setdefault(place, len(self._numbers))

    @property
    def found(self) -> list[Location]:
        return list(self._numbers)


def _row(one: Any, **instead: Any) -> list[Any]:
    """Return the fields of an attrs object in order, some of them replaced."""
    fields = [field.name for field in attrs.fields(type(one))]
    return [instead[name] if name in instead else getattr(one, name) for name in fields]
