# SPDX-License-Identifier: Apache-2.0
"""Lower the bodies of loops, and turn each loop into one call that runs its body."""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax

from amp_ir.dialect.loop import NAME, WHOLE, loop_of
from amp_ir.dispatch.hoist_packs import PackHoister
from amp_ir.ir.dataflow import Dataflow, op_name
from amp_ir.ir.dispatch_log import DispatchLog
from amp_ir.ir.library_call import library_call
from amp_ir.ir.location import from_span
from amp_ir.ir.loop_body import step_of_body
from amp_ir.ir.loop_call import LIBRARY, SYMBOL, write_loop_call
from amp_ir.ir.memory_plan import PlannedStep


def lower_loops(
    ir: tvm.IRModule, lower: Callable[..., PlannedStep], log: DispatchLog, *, packs: bool
) -> tuple[tvm.IRModule, dict[str, PlannedStep]]:
    """Turn loops into destination-passing calls; return their lowered bodies by name, too.

    Before:  y, h = amp_ir.loop(h0, x, ...)
    After:   y, h = call_dps_packed("amp_ir.loop.run", ("loop0", numbers, h0, x))

    `lower` lowers a body as a step; with `packs`, weights are packed before the loop.

    Ensures:  `log` says of each loop how many steps it has, and what its body dispatched.
    """
    flow = Dataflow(ir)
    bodies: dict[str, PlannedStep] = {}
    bindings = []
    for binding in flow.bindings:
        value = binding.value
        if op_name(value) == NAME:
            name, loop = f"loop{len(bodies)}", loop_of(value)
            whole = [k for k, (kind, _, _) in enumerate(loop.inputs) if kind == WHOLE]
            hoist = PackHoister(whole) if packs else None
            bodies[name] = planned = lower(step_of_body(loop), hoist=hoist)
            log.add(NAME, LIBRARY, f"{loop.length} steps")
            for note in planned.dispatched:
                log.add(note.op, note.library, note.reason)
            packed = []
            for pack in () if hoist is None else hoist.calls(value.args):
                packed.append(relax.DataflowVar(f"{name}_packed", pack.ty))
                bindings.append(relax.VarBinding(packed[-1], pack))
            plan = planned.plan
            value = write_loop_call(
                value,
                name,
                packed,
                arena_bytes=plan.arena_bytes,
                persistent_nbytes=plan.library_bytes,
            )
        bindings.append(relax.VarBinding(binding.var, value))
    return (flow.finish(bindings) if bodies else ir), bodies


def log_unrolled(ir: tvm.IRModule, log: DispatchLog) -> None:
    """Log each loop of a step for a GPU, whose steps are written one after the other."""
    for call in Dataflow(ir).calls(NAME).values():
        loop = loop_of(call)
        log.add(
            NAME,
            "single steps",
            f"the host calls the body of a loop, and a GPU runs without it: the {loop.length} "
            f"steps of the loop in {from_span(call.span)} are unrolled, which takes long to "
            "compile",
        )


def loops_as_calls(ir: tvm.IRModule) -> tvm.IRModule:
    """Replace each loop by one external call, to find which kernels the rest becomes.

    Before:  y, h = amp_ir.loop(h0, x, ...)
    After:   y, h = call_dps_packed("amp_ir.loop.run", (h0, x))
    """
    flow = Dataflow(ir)
    return flow.finish([_as_call(one) for one in flow.bindings]) if flow.calls(NAME) else ir


def _as_call(binding: relax.VarBinding) -> relax.VarBinding:
    value = binding.value
    if op_name(value) != NAME:
        return binding
    call = library_call(SYMBOL, list(value.args), value.ty, value.span)
    return relax.VarBinding(binding.var, call)
