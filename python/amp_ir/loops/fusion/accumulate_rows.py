# SPDX-License-Identifier: Apache-2.0
"""Fuse the gradient of a table with its addition to another gradient, as for tied embeddings."""

from __future__ import annotations

import attrs
from tvm import relax

from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.static_shape import extents_of

_GRADIENT = "amp_ir.embedding_backward"


@attrs.frozen(eq=False)
class Accumulation:
    """A sum of `base` and the gradient of a table that `call` computes."""

    call: relax.Call
    base: relax.Expr


@attrs.frozen(eq=False)
class Accumulations:
    """The sums by their variable, and the gradients that nothing else reads."""

    sums: dict[relax.Var, Accumulation] = attrs.field(factory=dict)
    fused: set[relax.Var] = attrs.field(factory=set)


def find_accumulations(flow: Dataflow) -> Accumulations:
    """Find sums of two float32 tables of which one is a table's gradient with no other reader.

    Before:  d = embedding_backward(grad, ids); g = add(w, d)
    After:   g = w, to whose rows at `ids` those of `grad` are added    # one table less in memory

    The rows are then added to `base` one by one, in order, instead of their sum: float32 sums in
    another order than PyTorch's, with errors of the same size.
    """
    found = Accumulations()
    gradients = flow.calls(_GRADIENT)
    if not gradients:
        return found
    for variable, sum_ in flow.calls("relax.add").items():
        for gradient, base in (sum_.args[:], sum_.args[::-1]):
            call = gradients.get(gradient)
            if call is not None and flow.uses[gradient] == 1 and _are_tables(call, base):
                found.sums[variable] = Accumulation(call, base)
                found.fused.add(gradient)
                break
    return found


def _are_tables(call: relax.Expr, base: relax.Expr) -> bool:
    types = (call.ty, base.ty)
    if any(str(type_.dtype) != "float32" for type_ in types):
        return False
    return extents_of(call.ty) == extents_of(base.ty)
