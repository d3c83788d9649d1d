# SPDX-License-Identifier: Apache-2.0
"""A plan with the kernels that the loops stage really makes, in place of the estimate."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import tvm
from tvm import relax

from amp_ir.amp.plan import CastPlan


def with_real_kernels(
    plan: CastPlan,
    ir: tvm.IRModule,
    kernels: Mapping[relax.Var, int],
    cast_kernels: frozenset[int],
) -> CastPlan:
    """`plan` with `kernel` of each op and `is_alone` of each cast as they came out.

    Args:
        plan: made with `ir`.
        ir: what autocast left; its casts are the plan's, in order.
        kernels: the kernel or library call that computes each variable of `ir`. A variable without
            one is -1 in the plan: a view, folded away, computed anew by its readers, or a matmul
            whose library call computes the following bias and activation too.
        cast_kernels: kernels that do nothing but cast.
    """
    bound = [binding for block in ir["main"].body.blocks for binding in block.bindings]
    is_cast = [_calls_cast(binding.value) for binding in bound]
    casts = [binding.var for binding, cast in zip(bound, is_cast, strict=True) if cast]
    alone = [kernels.get(variable, -1) in cast_kernels for variable in casts]
    by_name = {
        str(binding.var.name): kernels.get(binding.var, -1)
        for binding, cast in reversed(list(zip(bound, is_cast, strict=True)))
        if not cast
    }
    return attrs.evolve(
        plan,
        ops=tuple(attrs.evolve(one, kernel=by_name.get(one.variable, -1)) for one in plan.ops),
        casts=tuple(
            attrs.evolve(one, is_alone=is_alone)
            for one, is_alone in zip(plan.casts, alone, strict=True)
        ),
    )


def _calls_cast(value: relax.Expr) -> bool:
    return isinstance(value, relax.Call) and value.op.name == "amp_ir.cast"
