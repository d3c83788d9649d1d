# SPDX-License-Identifier: Apache-2.0
"""Loops that no later stage can do as loops: they are unrolled as soon as they are known."""

from __future__ import annotations

import tvm

from amp_ir.dialect.external_call import NAME as EXTERNAL
from amp_ir.dialect.loop import NAME, Loop, loop_of
from amp_ir.ir.dataflow import Dataflow, op_name
from amp_ir.ir.index_uses import uses_in_body
from amp_ir.ir.location import from_span
from amp_ir.rewrites.unroll_loops import unroll_loops

_DIVISIONS = ("relax.divide", "relax.floor_divide", "relax.mod", "relax.floor_mod")


def unroll_unsupported(ir: tvm.IRModule) -> tuple[tvm.IRModule, tuple[str, ...]]:
    """Unroll the loops whose bodies need a check of each step; return a note on each of them.

    Before:  y = amp_ir.loop(h0, w)        # its body reads w[argmax(h)]: is that in range?
    After:   h1 = embedding(w, argmax(h0)); h2 = embedding(w, argmax(h1)); ...
    """
    notes = []
    for call in Dataflow(ir).calls(NAME).values():
        loop = loop_of(call)
        reason = _reason(loop)
        if reason:
            notes.append(
                f"a loop of {loop.length} steps in {from_span(call.span)} is compiled step by "
                f"step, which takes long, since {reason}. Do that for all steps at once, before or "
                "after the loop"
            )
    if not notes:
        return ir, ()
    return unroll_loops(ir, lambda loop: bool(_reason(loop))), tuple(notes)


def _reason(loop: Loop) -> str:
    """Return why a loop cannot stay one; "" where it can."""
    for value in Dataflow(loop.body).values.values():
        name = op_name(value)
        if name == EXTERNAL:
            return "each step calls an op that amp_ir has no kernel of"
        if name in _DIVISIONS and "float" not in str(value.ty.dtype):
            return "each step divides integers"
    if None in uses_in_body(loop):
        return "each step computes indices, which are checked one by one"
    return ""
