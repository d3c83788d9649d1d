# SPDX-License-Identifier: Apache-2.0
"""Compute the ranges of the integers of a step, whatever the batch.

Interval arithmetic over the ops that make indices. A range is closed, and holds for every element
of a tensor. Only what follows from the step alone counts: an input has the range of its dtype.
Floats have a range where they cannot be NaN, as a uniform number or a cast integer; a NaN cast to
an integer may be anything.

Source: Moore, "Interval Analysis", 1966; narrowing by conditions as in Harrison, "Compiler analysis
    of the value ranges for variables", 1977.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tvm import relax
from tvm.ir import GenericConst

from amp_ir.ir.dataflow import op_name
from amp_ir.rewrites.ranges.number_range import (
    COMPARISONS,
    FALSE,
    MIRRORED,
    OPPOSITE,
    TRUE,
    Range,
    is_integer,
    join_all,
    limited,
    range_of_constant,
    range_of_dtype,
)
from amp_ir.rewrites.ranges.rules import FIELD_RULES, POINTWISE, RULES, Operands, Rule

_WHERE = "relax.where"
# How many conditions and narrowed values deep a `where` is looked into.
_DEPTH = 6

# The ranges of variables in one branch of a `where`.
Known = Mapping[relax.Var, Range]


class ValueRanges:
    """The ranges of a step's values, computed on demand."""

    def __init__(self, values: Mapping[relax.Var, relax.Expr]) -> None:
        self._values = values
        self._found: dict[relax.Var, Range | None] = {}

    def of(
        self, expr: relax.Expr, narrowed: Known | None = None, depth: int = _DEPTH
    ) -> Range | None:
        """Return the range of a tensor; None where it is unknown (a float that may be NaN).

        `narrowed` has the additional ranges of variables in one branch of a `where`.
        """
        if isinstance(expr, GenericConst):
            return range_of_constant(expr)
        if not isinstance(expr, relax.Var):
            return range_of_dtype(expr)
        if narrowed:
            if expr in narrowed:
                return narrowed[expr]
            # What is computed from a narrowed value, element by element, is narrower too.
            is_followed = depth and op_name(self._values.get(expr)) in POINTWISE
            return self._range_of(expr, narrowed, depth - 1) if is_followed else self.of(expr)
        if expr not in self._found:
            self._fill(expr)
        return self._found[expr]

    def _fill(self, wanted: relax.Var) -> None:
        """Compute the ranges of `wanted` and of all values it depends on, without recursion."""
        waiting = [wanted]
        while waiting:
            var = waiting[-1]
            missing = [one for one in self._operands(var) if one not in self._found]
            if missing and var not in self._found:
                waiting += missing
                continue
            waiting.pop()
            if var not in self._found:
                self._found[var] = self._range_of(var, None, _DEPTH)

    def _operands(self, var: relax.Var) -> list[relax.Var]:
        value, rule = self._rule_of(var)
        if isinstance(value, relax.Var):
            return [value]
        if rule is None and op_name(value) != _WHERE:
            return []
        parts: list[relax.Expr] = []
        for argument in value.args:
            parts += list(argument.fields) if isinstance(argument, relax.Tuple) else [argument]
        return [one for one in parts if isinstance(one, relax.Var)]

    def _rule_of(self, var: relax.Var) -> tuple[Any, Rule | None]:
        """Return the binding that computes a variable, and the rule for it."""
        value = self._values.get(var)
        if isinstance(value, relax.TupleGetItem):
            call = self._values.get(value.tuple_value)
            return call, FIELD_RULES.get((op_name(call), int(value.index)))
        return value, RULES.get(op_name(value))

    def _range_of(self, var: relax.Var, narrowed: Known | None, depth: int) -> Range | None:
        whole = range_of_dtype(var)
        value, rule = self._rule_of(var)
        if isinstance(value, (relax.Var, GenericConst)):
            return self.of(value, narrowed, depth)
        if op_name(value) == _WHERE:
            found = self._of_where(value, narrowed, depth)
        elif rule is not None:
            found = rule(Operands(value, lambda one: self.of(one, narrowed, depth)))
        else:
            return whole
        if found is None or not (math.isfinite(found.low) and math.isfinite(found.high)):
            return whole
        # An integer that leaves its dtype wraps around.
        is_inside = whole is None or (whole.low <= found.low and found.high <= whole.high)
        return found if is_inside else whole

    def _of_where(self, value: relax.Call, narrowed: Known | None, depth: int) -> Range | None:
        """Join the ranges of both branches under their conditions; skip an impossible branch."""
        condition, *branches = value.args
        parts = []
        for branch, holds in zip(branches, (True, False), strict=True):
            more = self._narrow(condition, holds=holds, narrowed=narrowed, depth=depth)
            if more is not None:
                parts.append(self.of(branch, {**(narrowed or {}), **more}, depth))
        return join_all(parts) if parts else None

    def _narrow(
        self, condition: relax.Expr, *, holds: bool, narrowed: Known | None, depth: int
    ) -> dict[relax.Var, Range] | None:
        """Return the ranges of variables where a condition holds, or not; None: impossible."""
        known = self.of(condition, narrowed, depth)
        if known is not None and known.meet(TRUE if holds else FALSE) is None:
            return None
        value = self._values.get(condition) if isinstance(condition, relax.Var) else None
        name = op_name(value)
        if not depth or value is None:
            return {}
        if name == "relax.logical_not":
            return self._narrow(value.args[0], holds=not holds, narrowed=narrowed, depth=depth - 1)
        if name in ("relax.logical_and", "relax.logical_or"):
            both = (name == "relax.logical_and") == holds
            parts = [
                self._narrow(one, holds=holds, narrowed=narrowed, depth=depth - 1)
                for one in value.args
            ]
            return _all_hold(parts) if both else _any_holds(parts)
        comparison = COMPARISONS.get(name)
        if comparison is None:
            return {}
        return self._narrow_by(comparison, value.args, holds=holds, narrowed=narrowed, depth=depth)

    def _narrow_by(
        self,
        comparison: str,
        args: Sequence[relax.Expr],
        *,
        holds: bool,
        narrowed: Known | None,
        depth: int,
    ) -> dict[relax.Var, Range] | None:
        left, right = args
        relation = comparison if holds else OPPOSITE[comparison]
        found: dict[relax.Var, Range] = {}
        for one, other, how in ((left, right, relation), (right, left, MIRRORED[relation])):
            mine, limit = self.of(one, narrowed, depth), self.of(other, narrowed, depth)
            if not isinstance(one, relax.Var) or mine is None or limit is None:
                continue
            if not is_integer(one) or not is_integer(other):
                continue
            within = mine.meet(limited(how, limit))
            if within is None:
                return None
            if within != mine:
                found[one] = within
        return found


def _all_hold(parts: Sequence[dict[relax.Var, Range] | None]) -> dict[relax.Var, Range] | None:
    """Return the ranges of variables where all conditions hold."""
    merged: dict[relax.Var, Range] = {}
    for part in parts:
        if part is None:
            return None
        for var, one in part.items():
            both = merged.get(var, one).meet(one)
            if both is None:
                return None
            merged[var] = both
    return merged


def _any_holds(parts: Sequence[dict[relax.Var, Range] | None]) -> dict[relax.Var, Range] | None:
    """Return the ranges of variables where any of the conditions holds."""
    possible = [part for part in parts if part is not None]
    if not possible:
        return None
    merged = dict(possible[0])
    for part in possible[1:]:
        merged = {var: one.join(part[var]) for var, one in merged.items() if var in part}
    return merged
