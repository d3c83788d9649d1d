# SPDX-License-Identifier: Apache-2.0
"""Number the buckets of a step in the order in which they begin, which is that of all ranks."""

from __future__ import annotations

import tvm
from tvm import relax

from amp_ir.dialect.collectives import STARTS, WAITS
from amp_ir.dialect.registry import call_op, options_of
from amp_ir.ir.dataflow import Dataflow


def number_buckets(ir: tvm.IRModule) -> tvm.IRModule:
    """Give each pair of a start and a wait its number.

    Before:  f = reduce_scatter_start(..., bucket=0); ...; h = all_reduce_start(..., bucket=0)
    After:   f = reduce_scatter_start(..., bucket=0); ...; h = all_reduce_start(..., bucket=1)

    Ensures: numbers are those of the starts, from 0 on.
    """
    flow = Dataflow(ir)
    halves = flow.calls(*STARTS, *WAITS)
    numbers = {variable: k for k, variable in enumerate(flow.calls(*STARTS))}
    bindings = []
    for binding in flow.bindings:
        value = binding.value
        name = value.op.name if binding.var in halves else ""
        if name in STARTS:
            value = _numbered(value, numbers[binding.var])
        elif name in WAITS:
            start = flow.values[value.args[0]].tuple_value
            value = _numbered(value, numbers[start])
        bindings.append(relax.VarBinding(binding.var, value))
    return flow.finish(bindings)


def _numbered(call: relax.Call, number: int) -> relax.Call:
    new = call_op(
        call.op.name, list(call.args), call.span, **{**options_of(call), "bucket": number}
    )
    relax.expr._update_type(new, call.ty)
    return new
