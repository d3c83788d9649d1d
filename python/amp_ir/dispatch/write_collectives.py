# SPDX-License-Identifier: Apache-2.0
"""Write collectives as calls of the process group."""

from __future__ import annotations

import tvm
from tvm import relax

from amp_ir.dialect.collectives import STARTS, WAITS
from amp_ir.dialect.registry import options_of
from amp_ir.errors import RuleError
from amp_ir.ir.collective_call import write_collective
from amp_ir.ir.dataflow import Dataflow, op_name, variables_of
from amp_ir.ir.dispatch_log import DispatchLog
from amp_ir.ir.location import from_span

LIBRARY = "the process group"


def write_collectives(ir: tvm.IRModule, *, log: DispatchLog) -> tvm.IRModule:
    """Turn the starts and waits of collectives into destination-passing calls.

    Before:  f = amp_ir.all_reduce_start(g1, g0, bucket=2, ...)
    After:   f = call_dps_packed("amp_ir.collective.start", ("{kind: all_reduce, ...}", g1, g0))

    Ensures:  what is in flight is read by the wait of its bucket alone, in the dtype in which it
              was sent.
              `log` says where another dtype is sent than `comm_dtype=` asked for.
    Errors:   RuleError where a cast reads what is in flight.
    """
    flow = Dataflow(ir)
    starts, waits = flow.calls(*STARTS), flow.calls(*WAITS)
    if not starts:
        return ir
    for variable, call in starts.items():
        _check_in_flight(flow, variable, call)
        _log(call, log)
    written = {**starts, **waits}
    return flow.finish(
        [
            relax.VarBinding(
                one.var, write_collective(one.value) if one.var in written else one.value
            )
            for one in flow.bindings
        ]
    )


def _check_in_flight(flow: Dataflow, variable: relax.Var, call: relax.Call) -> None:
    wait = call.op.name.replace("_start", "_wait")
    for part in flow.readers.get(variable, ()):
        for reader in flow.readers.get(part, ()):
            value = flow.values[reader]
            if op_name(value) != wait or options_of(value)["bucket"] != options_of(call)["bucket"]:
                raise RuleError(
                    f"{call.op.name} in {from_span(call.span)} sends {call.ty.fields[0].dtype}, "
                    f"and {op_name(value) or 'the result'} reads what is on its way before "
                    f"{wait} has it: rules or overrides give the two other dtypes. Select both: "
                    f'Override(op="{wait.removesuffix("wait")}*", to=...)'
                )
        assert part not in variables_of(flow.result), "what is on its way has a wait"


def _log(call: relax.Call, log: DispatchLog) -> None:
    wanted = str(options_of(call).get("comm_dtype") or "")
    sent = str(call.ty.fields[0].dtype)
    reason = "" if wanted in ("", sent) else f"sent as {sent}, though comm_dtype={wanted!r}"
    log.add(call.op.name, LIBRARY, reason)
