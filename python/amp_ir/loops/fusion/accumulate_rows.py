# SPDX-License-Identifier: Apache-2.0
"""The gradient of a table added to another gradient, as with tied embeddings, in one kernel."""

from __future__ import annotations

from collections import Counter

import attrs
from tvm import relax

from amp_ir.ir.dataflow import variables_of
from amp_ir.ir.static_shape import extents_of

_GRADIENT = "amp_ir.embedding_backward"


@attrs.frozen(eq=False)
class Accumulation:
    """A sum of `base` and what `call`, the gradient of a table, would be."""

    call: relax.Call
    base: relax.Expr


@attrs.frozen(eq=False)
class Accumulations:
    """The sums by their variable, and the gradients that nothing else reads."""

    sums: dict[relax.Var, Accumulation]
    absorbed: set[relax.Var]


def find_accumulations(main: relax.Function) -> Accumulations:
    """Sums of two float32 tables of which one is a table's gradient that nothing else reads.

    Before:  d = embedding_backward(grad, ids); g = add(w, d)
    After:   g = w, to whose rows at `ids` those of `grad` are added    # one table less in memory

    The rows are then added to `base` one by one, in order, in place of their sum: float32 sums in
    another order than PyTorch's, with errors of the same size.
    """
    bindings = [binding for block in main.body.blocks for binding in block.bindings[:]]
    calls = {binding.var: binding.value for binding in bindings}
    if not any(_is_gradient(value) for value in calls.values()):
        return Accumulations({}, set())
    uses = Counter(variable for value in calls.values() for variable in variables_of(value))
    uses.update(variables_of(main.body.body))
    found = Accumulations({}, set())
    for variable, value in calls.items():
        if isinstance(value, relax.Call) and value.op.name == "relax.add":
            for gradient, base in (value.args[:], value.args[::-1]):
                call = calls.get(gradient) if isinstance(gradient, relax.Var) else None
                if _is_gradient(call) and uses[gradient] == 1 and _are_tables(call, base):
                    found.sums[variable] = Accumulation(call, base)
                    found.absorbed.add(gradient)
                    break
    return found


def _is_gradient(call: relax.Expr | None) -> bool:
    return isinstance(call, relax.Call) and call.op.name == _GRADIENT


def _are_tables(call: relax.Expr, base: relax.Expr) -> bool:
    types = (call.ty, base.ty)
    if any(str(type_.dtype) != "float32" for type_ in types):
        return False
    return extents_of(call.ty) == extents_of(base.ty)
