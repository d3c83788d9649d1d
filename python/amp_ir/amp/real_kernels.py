# SPDX-License-Identifier: Apache-2.0
"""The kernels of fusion for autocast: a step without its optimizer, and the plan with kernels."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import tvm
from tvm import relax

from amp_ir.amp.plan import CastPlan, Moved
from amp_ir.ir.dataflow import Dataflow, variables_of
from amp_ir.ir.location import from_span


def with_real_kernels(
    plan: CastPlan,
    ir: tvm.IRModule,
    kernels: Mapping[relax.Var, int],
    cast_kernels: frozenset[int],
    moved: tuple[Moved, ...] = (),
) -> CastPlan:
    """Return `plan` with the real `kernel` of each op and `is_alone` of each cast, and `moved`.

    Args:
        plan: made with `ir`.
        ir: the result of autocast; its casts are the plan's, in order.
        kernels: the kernel or library call that computes each variable of `ir`. A variable without
            one is -1 in the plan: a view, folded away, recomputed by its readers, or a matmul whose
            library call computes the following bias and activation too.
        cast_kernels: kernels that do nothing but cast.
    """
    flow = Dataflow(ir)
    casts = flow.calls("amp_ir.cast")
    alone = [kernels.get(variable, -1) in cast_kernels for variable in casts]
    by_name = {
        str(variable.name): kernels.get(variable, -1)
        for variable in reversed(flow.values)
        if variable not in casts
    }
    return attrs.evolve(
        plan,
        moved=moved,
        ops=tuple(attrs.evolve(one, kernel=by_name.get(one.variable, -1)) for one in plan.ops),
        casts=tuple(
            attrs.evolve(one, is_alone=is_alone)
            for one, is_alone in zip(plan.casts, alone, strict=True)
        ),
    )


def without_optimizer(ir: tvm.IRModule) -> tvm.IRModule:
    """Return `main` up to the optimizer, with all that is read after as its outputs.

    The optimizer's ops keep their dtypes in any placement, and are most of the ops of a step.
    """
    flow = Dataflow(ir)
    kept: list[relax.Binding] = []
    bound: set[relax.Var] = set()
    later: dict[relax.Var, None] = {}
    gone: set[relax.Var] = set()
    for binding in flow.bindings:
        read = variables_of(binding.value)
        if _is_optimizers(binding.value) or any(variable in gone for variable in read):
            gone.add(binding.var)
            later.update(dict.fromkeys(read))
        else:
            kept.append(binding)
            bound.add(binding.var)
    later.update(dict.fromkeys(variables_of(flow.result)))
    results = relax.Tuple([variable for variable in later if variable in bound])
    output = relax.Var("outputs", results.ty)
    return flow.finish([*kept, relax.VarBinding(output, results)], output)


def _is_optimizers(value: relax.Expr) -> bool:
    return isinstance(value, relax.Call) and from_span(value.span).phase == "optimizer"
