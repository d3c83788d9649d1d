# SPDX-License-Identifier: Apache-2.0
"""Conversion of decisions to a CastPlan, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amp_ir.amp.decisions import Decision, Mode
from amp_ir.amp.kernels import Kind, kind_of
from amp_ir.amp.plan import CastPlan, PlannedCast, PlannedOp
from amp_ir.amp.rewrite import CastRecord, Rewritten
from amp_ir.errors import OptionError
from amp_ir.ir.step_graph import Op, StepGraph, Value


def make_plan(
    graph: StepGraph,
    decisions: Sequence[Decision],
    kernels: Sequence[int],
    rewritten: Rewritten,
    **choices: Any,
) -> CastPlan:
    """Record decisions and casts; `choices` are the other fields of the plan."""
    ops = [_planned_op(graph, op, decisions[op.position], kernels, rewritten) for op in graph.ops]
    casts = [_planned_cast(graph, cast) for cast in rewritten.casts]
    return CastPlan(ops=tuple(ops), casts=tuple(casts), **choices)


def _planned_op(
    graph: StepGraph, op: Op, decision: Decision, kernels: Sequence[int], rewritten: Rewritten
) -> PlannedOp:
    place = op.location
    roots = [] if op.is_view else [graph.values[graph.values[leaf].root] for leaf in op.reads]
    results = [] if op.is_view else rewritten.result_dtypes[op.position]
    return PlannedOp(
        id=op.position,
        name=op.label,
        variable=str(op.variable.name),
        module=place.module,
        phase=place.phase,
        line=f"{place.file}:{place.line}" if place.file else "",
        rule=decision.rule,
        reason=decision.reason,
        label=decision.label,
        modes=tuple(mode.value for mode in decision.modes),
        follows=tuple(decision.follows),
        reads=tuple(rewritten.read_dtypes[op.position]) if not op.is_view else (),
        results=tuple(results),
        accumulate=decision.accumulate,
        sets_result=decision.sets_result,
        kernel=kernels[op.position],
        is_free=decision.is_free,
        sources=tuple(root.op for root in roots),
        left=tuple(_left_dtype(graph, root, rewritten) for root in roots),
    )


def _left_dtype(graph: StepGraph, root: Value, rewritten: Rewritten) -> str:
    """Return the dtype in which the op that makes a value stores it."""
    if root.op < 0 or not rewritten.result_dtypes[root.op]:
        return root.dtype
    results = [graph.values[leaf] for leaf in graph.ops[root.op].results]
    number = next(k for k, value in enumerate(results) if value is root)
    return rewritten.result_dtypes[root.op][number]


def _planned_cast(graph: StepGraph, cast: CastRecord) -> PlannedCast:
    value = graph.values[cast.source]
    source = graph.values[value.root].op
    consumer = cast.consumer if cast.consumer < len(graph.ops) else -1
    fuses = any(
        position >= 0 and kind_of(graph.ops[position]) in (Kind.LOOP, Kind.VIEW)
        for position in ((source,) if cast.is_shared else (source, consumer))
    )
    return PlannedCast(
        cast.variable,
        cast.from_dtype,
        cast.to_dtype,
        value.size,
        max(source, -1),
        consumer,
        cast.is_shared,
        not (fuses or value.is_constant),
    )


def replay(plan: CastPlan, graph: StepGraph, amp_dtype: str) -> list[Decision]:
    """Return the decisions of a plan, for the step that it was made from.

    Raises:
        OptionError: the step has other ops, or another low dtype is asked for.
    """
    if plan.amp_dtype != amp_dtype:
        raise OptionError(f"the plan is for {plan.amp_dtype}, and amp_dtype is {amp_dtype!r}")
    if len(plan.ops) != len(graph.ops):
        raise OptionError(
            f"the plan has {len(plan.ops)} ops and the step has {len(graph.ops)}; make a new plan"
        )
    decisions = []
    for planned, op in zip(plan.ops, graph.ops, strict=True):
        fits = len(planned.modes) == len(op.reads) and len(planned.follows) == len(op.results)
        if planned.name != op.name or not fits:
            raise OptionError(
                f"op {planned.id} of the plan is {planned.name}, of the step {op.name} in "
                f"{op.location}; make a new plan"
            )
        modes = [Mode(mode) for mode in planned.modes]
        decision = Decision(
            planned.rule, planned.reason, modes, planned.label, list(planned.follows)
        )
        decision.accumulate, decision.sets_result = planned.accumulate, planned.sets_result
        decision.is_free = planned.is_free
        decisions.append(decision)
    return decisions
