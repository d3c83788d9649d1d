# SPDX-License-Identifier: Apache-2.0
"""The decisions in the bodies of loops, as part of the plan of their step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import tvm
from tvm import relax

from amp_ir.amp.kernels import Kind, kind_of
from amp_ir.amp.loops import CastLoops, OutsideCast
from amp_ir.amp.plan import CastPlan, LoopPlan, PlannedCast, PlannedOp
from amp_ir.dialect.loop import NAME
from amp_ir.errors import OptionError
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.step_graph import Op, StepGraph


def operand_names(graph: StepGraph, loop: Op, input_names: Sequence[str]) -> list[str]:
    """Return the names of the step's inputs that a loop reads; "" for what the step computes."""
    names = dict(zip(graph.inputs, input_names, strict=True))
    return [names.get(graph.values[leaf].root, "") for leaf in loop.reads]


def plan_of_loop(plan: CastPlan, position: int) -> CastPlan:
    """Return the decisions in the body of the loop that is the op at a position of the step.

    Raises:
        OptionError: the plan has none.
    """
    for one in plan.loops:
        if one.id == position:
            return one.plan
    raise OptionError(
        f"the plan has no decisions for the body of the loop that is op {position} of the step; "
        "make a new plan"
    )


def plan_with_loops(
    plan: CastPlan, graph: StepGraph, ir: tvm.IRModule, made: CastLoops
) -> CastPlan:
    """Return a step's plan with those of its loops, and with the casts beside them.

    Args:
        plan: of the step without the bodies of its loops.
        graph: the step before autocast.
        ir: the step after it; its casts are those of the result, in order.
        made: the loops of `ir`.
    """
    if not made.loops:
        return plan
    positions = [op.position for op in graph.ops if op.name == NAME]
    own = iter(plan.casts)
    casts = [
        _planned(plan, graph, positions[made.outside[one].number], str(one.name), made.outside[one])
        if one in made.outside
        else next(own)
        for one in Dataflow(ir).calls("amp_ir.cast")
    ]
    loops = [LoopPlan(positions[one.number], one.length, one.plan) for one in made.loops]
    calls = dict(zip(positions, Dataflow(ir).calls(NAME).values(), strict=True))
    ops = _with_dtypes_of_loops(plan, graph, calls)
    return attrs.evolve(plan, ops=ops, casts=tuple(casts), loops=tuple(loops))


def _with_dtypes_of_loops(
    plan: CastPlan, graph: StepGraph, calls: Mapping[int, relax.Call]
) -> tuple[PlannedOp, ...]:
    """Return the ops, with what loops read and leave after autocast; `calls` is by position.

    The decisions of the step leave a loop as it is: what its body makes low is known only now.
    """
    ops = list(plan.ops)
    dtype_of: dict[int, str] = {}
    for position, call in calls.items():
        reads, results = _dtypes(call.args), _dtypes([call])
        ops[position] = attrs.evolve(ops[position], reads=reads, results=results)
        dtype_of.update(zip(graph.ops[position].results, results, strict=True))
    for number, op in enumerate(graph.ops):
        if ops[number].left:
            roots = (graph.values[leaf].root for leaf in op.reads)
            left = (dtype_of.get(*pair) for pair in zip(roots, ops[number].left, strict=True))
            ops[number] = attrs.evolve(ops[number], left=tuple(left))
    return tuple(ops)


def _dtypes(values: Sequence[relax.Expr]) -> tuple[str, ...]:
    """Return the dtypes of the tensors that values and tuples of them are."""
    types = [one.ty for one in values]
    flat = [t for ty in types for t in (ty.fields if isinstance(ty, relax.TupleType) else [ty])]
    return tuple(str(one.dtype) for one in flat)


def _planned(
    plan: CastPlan, graph: StepGraph, position: int, variable: str, cast: OutsideCast
) -> PlannedCast:
    source, consumer = position, position
    if cast.operand is not None:
        source = max(plan.ops[position].sources[cast.operand], -1)
    else:
        ids = {one.variable: one.id for one in reversed(plan.ops)}
        consumer = ids.get(cast.reader, -1)
    fuses = source >= 0 and kind_of(graph.ops[source]) in (Kind.LOOP, Kind.VIEW)
    return PlannedCast(
        variable, cast.from_dtype, cast.to_dtype, cast.elements, source, consumer,
        is_shared=True, is_alone=not fuses,
    )  # fmt: skip
