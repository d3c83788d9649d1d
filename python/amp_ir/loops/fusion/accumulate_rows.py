# SPDX-License-Identifier: Apache-2.0
"""Fuse the gradient of a table with its addition to the table itself, or to another gradient."""

from __future__ import annotations

import attrs
from tvm import relax

from amp_ir.ir.dataflow import Dataflow, op_name
from amp_ir.ir.multiples import factored, is_float32
from amp_ir.ir.static_shape import extents_of

_GRADIENT = "amp_ir.embedding_backward"
_SUMS = ("relax.add", "relax.subtract")


@attrs.frozen(eq=False)
class Accumulation:
    """A sum of `base` and of the gradient of a table that `call` computes, times all `factors`."""

    call: relax.Call
    base: relax.Expr
    factors: tuple[relax.Expr, ...]

    @property
    def arguments(self) -> list[relax.Expr]:
        """Return the arguments of the sum's kernel: those of the gradient, and the others."""
        return [*self.call.args, self.base, *self.factors]


@attrs.frozen(eq=False)
class Accumulations:
    """The sums by their variable, and the values in them that nothing else reads."""

    sums: dict[relax.Var, Accumulation] = attrs.field(factory=dict)
    fused: set[relax.Var] = attrs.field(factory=set)


def find_accumulations(flow: Dataflow) -> Accumulations:
    """Find sums of two float32 tables of which one is a multiple of a table's gradient.

    Before:  d = embedding_backward(grad, ids); p1 = add(p, multiply(d, -lr))    # p1 updates p
    After:   p1 = p, to whose rows at `ids` the sums of those of `grad`, times -lr, are added

    The rest of the table is neither read nor written where `p` has no later reader, and no gradient
    is held. Nothing else may read the gradient. Each row is PyTorch's to the bit: p + 0 is p, and
    where a factor is infinite or NaN the kernel puts NaN into the other rows.
    """
    found = Accumulations()
    if not flow.calls(_GRADIENT):
        return found
    for variable, sum_ in flow.calls(*_SUMS).items():
        for at in (0, 1):
            one = _accumulation(flow, sum_, at)
            if one is not None:
                found.sums[variable], inside = one
                found.fused.update(inside)
                break
    return found


def _accumulation(
    flow: Dataflow, sum_: relax.Call, at: int
) -> tuple[Accumulation, list[relax.Var]] | None:
    """Return the sum whose argument `at` is a multiple of a gradient, and the values inside."""
    base, one = sum_.args[1 - at], sum_.args[at]
    factors, inside = [], []
    if sum_.op.name == "relax.subtract":
        if at == 0:
            return None  # base is what is subtracted
        factors.append(relax.const(-1.0, "float32"))
    while isinstance(one, relax.Var) and flow.uses[one] == 1 and is_float32(one.ty):
        inside.append(one)
        call = flow.values.get(one)
        if op_name(call) == _GRADIENT:
            if not _are_alike(one, base):
                return None
            # The innermost first, as PyTorch multiplies.
            return Accumulation(call, base, tuple(reversed(factors))), inside
        multiple = factored(call)
        if multiple is None:
            return None
        one, factor = multiple
        factors.append(factor)
    return None


def _are_alike(gradient: relax.Expr, base: relax.Expr) -> bool:
    return is_float32(base.ty) and extents_of(gradient.ty) == extents_of(base.ty)
