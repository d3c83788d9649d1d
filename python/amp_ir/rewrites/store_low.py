# SPDX-License-Identifier: Apache-2.0
"""Round parameters that are only looked up or moved, so that they can be stored low."""

from __future__ import annotations

from collections.abc import Collection

import tvm
from tvm import relax

from amp_ir.dialect.registry import call_op
from amp_ir.ir.dataflow import Dataflow, op_name, replaced
from amp_ir.rewrites.fold_casts import CASTS

# Their results are some of their arguments' numbers, so that rounding those rounds nothing else.
_MOVES = (
    "amp_ir.embedding", "amp_ir.index", "relax.take", "relax.gather_elements", "relax.reshape",
    "relax.permute_dims", "relax.expand_dims", "relax.squeeze", "relax.strided_slice",
    "relax.broadcast_to", "relax.concat", "relax.split",
)  # fmt: skip


def store_low(ir: tvm.IRModule, inputs: Collection[relax.Var], amp_dtype: str) -> tvm.IRModule:
    """Read parameters through the low dtype where all their readers are moves, or casts to it.

    Before:  y = embedding(table, ids); z = matmul(x, cast(table, "bfloat16"))
    After:   low = cast(table, "bfloat16")
             y = embedding(cast(low, "float32"), ids); z = matmul(x, low)

    Requires: the output of autocast; `inputs` are parameters that no call changes.
    Ensures:  results differ by one rounding of each such parameter, 2^-9 of it in bfloat16 and
              2^-12 in float16; types stay. `fold_parameters` then stores `low` and not `table`.
    """
    flow = Dataflow(ir)
    chosen = [
        one
        for one in inputs
        if str(one.ty.dtype) == "float32" and _is_movable(flow, one, amp_dtype)
    ]
    if not chosen:
        return ir
    bindings: list[relax.VarBinding] = []
    builder = relax.BlockBuilder()
    low_of: dict[relax.Var, relax.Var] = {}
    for one in chosen:
        low = builder.normalize(call_op("amp_ir.cast", [one], None, dtype=amp_dtype))
        low_of[one] = relax.DataflowVar(f"{one.name}_low", low.ty)
        bindings.append(relax.VarBinding(low_of[one], low))
    for binding in flow.bindings:
        value = binding.value
        read = [one for one in getattr(value, "args", []) if one in low_of]
        if read and op_name(value) in CASTS:
            value = low_of[read[0]]
        elif read:
            now = {}
            for one in read:
                wide = call_op("amp_ir.cast", [low_of[one]], value.span, dtype="float32")
                variable = relax.DataflowVar(f"{one.name}_full", one.ty)
                bindings.append(relax.VarBinding(variable, builder.normalize(wide)))
                now[one] = variable
            value = replaced(value, now)
        bindings.append(relax.VarBinding(binding.var, value))
    return flow.finish(bindings)


def _is_movable(flow: Dataflow, variable: relax.Var, amp_dtype: str) -> bool:
    """Return whether moves and casts to the low dtype are all that reads a variable."""
    calls = [flow.values[one] for one in flow.readers.get(variable, [])]
    is_result = flow.uses[variable] != len(calls)
    return (
        bool(calls)
        and not is_result
        and all(
            op_name(call) in _MOVES or (op_name(call) in CASTS and str(call.ty.dtype) == amp_dtype)
            for call in calls
        )
    )
