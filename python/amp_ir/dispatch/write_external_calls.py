# SPDX-License-Identifier: Apache-2.0
"""Write what amp_ir has no kernel of as calls of PyTorch's own implementation."""

from __future__ import annotations

import tvm
from tvm import relax

from amp_ir.dialect.external_call import NAME, external_op
from amp_ir.ir.dataflow import Dataflow, op_name
from amp_ir.ir.dispatch_log import EXTERNAL_CALL, DispatchLog
from amp_ir.ir.external_call import write_external
from amp_ir.ir.location import from_span


def write_external_calls(ir: tvm.IRModule, *, log: DispatchLog) -> tvm.IRModule:
    """Turn external calls into destination-passing calls of PyTorch.

    Before:  y = amp_ir.external_call(x, op="aten::lgamma.default", ...)
    After:   y = call_dps_packed("amp_ir.external.call", ("{op: aten::lgamma...}", x))

    Ensures:  `log` says each op once, with its number of calls and the place of the first.
    """
    flow = Dataflow(ir)
    first: dict[str, str] = {}
    bindings = []
    for binding in flow.bindings:
        value = binding.value
        if op_name(value) == NAME:
            op = external_op(value)
            kind = "amp_ir has no kernel of it" if op.startswith("aten::") else "it is a custom op"
            reason = first.setdefault(op, f"{kind} (first in {from_span(value.span)})")
            log.add(op, EXTERNAL_CALL, reason)
            value = write_external(value)
        bindings.append(relax.VarBinding(binding.var, value))
    return flow.finish(bindings) if first else ir
