# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: `autocast`, and its plan with the kernels that fusion makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
import tvm
from tvm import relax

from amp_ir.amp import autocast as autocast_stage
from amp_ir.amp.cast_traffic import traffic_by_reason
from amp_ir.amp.custom_type_hint import ops_with_own_rules
from amp_ir.amp.hints import LOW_DTYPES
from amp_ir.amp.overrides import Override, QuietOverride
from amp_ir.amp.plan import CastPlan
from amp_ir.amp.real_kernels import with_real_kernels
from amp_ir.dialect.loop import NAME as LOOP
from amp_ir.dialect.loop import loop_of
from amp_ir.dialect.registry import options_of
from amp_ir.dispatch.decompose_attention import decompose_attention
from amp_ir.dispatch.decompose_recurrence import recurrence_as_calls
from amp_ir.dispatch.dispatch import dispatch
from amp_ir.dispatch.lower_loops import loops_as_calls
from amp_ir.dispatch.write_collectives import write_collectives
from amp_ir.dispatch.write_external_calls import write_external_calls
from amp_ir.errors import OptionError
from amp_ir.host.paused_garbage_collection import paused_garbage_collection
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.dispatch_log import DispatchLog
from amp_ir.ir.options import batch_of, check_module, dtype_name
from amp_ir.ir.public_function import public_function
from amp_ir.ir.stages import stage
from amp_ir.ir.step_module import StepModule
from amp_ir.loops.fusion.kernel_assignment import assign_kernels, stored_tensors
from amp_ir.report.stage_files import current_stage_files
from amp_ir.rewrites.fold_casts import fold_casts
from amp_ir.rewrites.unroll_loops import unroll_loops


@public_function("amp_ir.autocast")
@paused_garbage_collection()
def autocast(
    mod: StepModule | tvm.IRModule,
    args: Any = None,
    *,
    amp_dtype: str | torch.dtype = "float16",
    out_dtype: str | torch.dtype | None = None,
    overrides: Sequence[Override] = (),
    policy: str = "default",
    placement: str = "cut",
    on_unknown: str = "error",
    plan: CastPlan | None = None,
    verbose: bool = False,
) -> Any:
    """Use a low dtype where the rules allow it, and insert the casts that this needs.

    Parameters, optimizer state and results keep their dtypes. The decisions are in `plan` of what
    is returned; see `amp_ir.amp.autocast.autocast` for what holds of the new program.

    Args:
        mod: what `trace_step` or `trace_model` returns, or a bare `tvm.IRModule`.
        args: the example batch; where it is given, it is compared with the captured one.
        amp_dtype: "float16", "bfloat16", or "float32", which changes nothing; or torch's dtypes.
        out_dtype: the dtype of float32 results; state keeps its dtype.
        overrides: `Override` objects, of which the last that matches a call decides.
        policy: "default", "torch", "aggressive" or "conservative"; see `list_ops`.
        placement: "cut" (least bytes) or "greedy" (RAF's majority).
        on_unknown: "error", or "float32" to leave ops without a rule in float32.
        plan: a CastPlan to follow instead of rules, overrides and placement.
        verbose: print every cast by the path of its module, as `mod.plan.list_casts()` has them.

    Raises:
        RuleError: ops without a rule; the message lists all of them.
        OptionError: an option has a value that it does not accept, or selects nothing.
    """
    if isinstance(mod, StepModule) and args is not None:
        batch_of(mod, args)
    if plan is not None and overrides:
        raise OptionError(
            "plan= is followed as it is, so that overrides= would change nothing; give the "
            "overrides without a plan, or save the plan that they make"
        )
    options: dict[str, Any] = {
        "amp_dtype": dtype_name(amp_dtype),
        "out_dtype": dtype_name(out_dtype),
        "overrides": overrides,
        "policy": policy,
        "placement": placement,
        "on_unknown": on_unknown,
        "plan": plan,
    }
    mod = _as_it_was_decided(mod, plan)
    between_ranks = _comm_overrides(mod, options)
    if between_ranks:
        options["overrides"] = (*between_ranks, *overrides)
    before = mod.ir if isinstance(mod, StepModule) else mod
    with stage("amp", before, current_stage_files()) as running:
        found = autocast_stage.autocast(mod, args, find_kernels=_kernels_of, **options)
        running.program = found.ir if isinstance(found, StepModule) else found
    if isinstance(found, StepModule) and found is not mod:
        found = attrs.evolve(found, cast_options=options, own_rules=ops_with_own_rules())
    if verbose and isinstance(found, StepModule) and found.plan is not None:
        print(found.plan.list_casts())
    return found


# The collectives whose dtype `comm_dtype=` decides.
_REDUCTIONS = ("amp_ir.all_reduce", "amp_ir.reduce_scatter")


def _comm_overrides(
    mod: StepModule | tvm.IRModule, options: dict[str, Any]
) -> tuple[Override, ...]:
    """Return what `comm_dtype=` decides: the dtype in which ranks exchange gradients.

    Raises:
        OptionError: it is another low dtype than the step's.
    """
    if options["plan"] is not None:
        return ()
    ir = mod.ir if isinstance(mod, StepModule) else mod
    wanted = comm_dtypes(ir) if isinstance(ir, tvm.IRModule) else ()
    amp_dtype = options["amp_dtype"]
    other = [one for one in wanted if one != amp_dtype]
    if other and amp_dtype in LOW_DTYPES:
        raise OptionError(
            f"comm_dtype={other[0]!r} and amp_dtype={amp_dtype!r}: a step has one low dtype; make "
            "them the same, or leave one out"
        )
    return _exchange_low(ir, amp_dtype) if amp_dtype in wanted else ()


def autocast_between_ranks(mod: StepModule, args: Any) -> StepModule:
    """Insert the casts that `comm_dtype=` asks for, and no others."""
    wanted = comm_dtypes(mod.ir)
    if not wanted:
        return mod
    everything = Override(op="*", to="original")
    exchange = _exchange_low(mod.ir, wanted[0])
    found: StepModule = autocast(mod, args, amp_dtype=wanted[0], overrides=(everything, *exchange))
    return found


def _exchange_low(ir: tvm.IRModule, comm_dtype: str) -> tuple[Override, ...]:
    """Return the overrides by which the collectives of a `comm_dtype` exchange in it."""
    flow = Dataflow(ir)
    return tuple(
        QuietOverride(op=f"{op}_*", attributes={"comm_dtype": (comm_dtype,)}, to="low")
        for op in _REDUCTIONS
        if any(
            options_of(one)["comm_dtype"] == comm_dtype
            for one in flow.calls(f"{op}_start").values()
        )
    )


def comm_dtypes(ir: tvm.IRModule) -> list[str]:
    """Return the dtypes that the user wants between ranks, each once."""
    starts = Dataflow(ir).calls(*(f"{op}_start" for op in _REDUCTIONS)).values()
    return sorted({str(options_of(one)["comm_dtype"]) for one in starts} - {""})


def _as_it_was_decided(
    mod: StepModule | tvm.IRModule, plan: CastPlan | None
) -> StepModule | tvm.IRModule:
    """Return the step with its loops unrolled where the plan is one of single steps."""
    is_of_steps = isinstance(plan, CastPlan) and not any(one.name == LOOP for one in plan.ops)
    if not isinstance(mod, StepModule) or not is_of_steps:
        return mod
    return mod.with_ir(unroll_loops(mod.ir))


def _kernels_of(ir: tvm.IRModule) -> dict[relax.Var, int]:
    """Find the kernel or library call that computes each variable; nothing is written."""
    found = assign_kernels(dispatch(_decomposed_for_fusion(ir)))
    return {variable: place.kernel for variable, place in found.items()}


def _decomposed_for_fusion(ir: tvm.IRModule) -> tvm.IRModule:
    """Return attention as its parts, and a recurrent layer as the one call that it is on a CPU."""
    ir = write_collectives(loops_as_calls(ir), log=DispatchLog())
    return recurrence_as_calls(decompose_attention(ir))


def explain_plan(mod: StepModule) -> CastPlan:
    """Return the plan of a step that went through autocast, with the kernels it really gets.

    `mod.plan` was made before fusion and estimates which ops share a kernel. Here `kernel` of each
    op, whether a cast is alone, and what the step moves because of dtypes (`cast_traffic`) are what
    the loops stage does; nothing is compiled.

    Raises:
        OptionError: the step has no plan.
    """
    check_module(mod, "explain_plan")
    if mod.plan is None:
        raise OptionError("the step has no plan; pass it through amp_ir.autocast first")
    plan = _with_kernels(mod.plan, mod.ir)
    bodies = [loop_of(call).body for call in Dataflow(mod.ir).calls(LOOP).values()]
    loops = [
        attrs.evolve(one, plan=_with_kernels(one.plan, body))
        for one, body in zip(plan.loops, bodies, strict=True)
    ]
    moved = [
        attrs.evolve(one, nbytes=loop.length * one.nbytes)
        for loop in loops
        for one in loop.plan.moved
    ]
    return attrs.evolve(plan, loops=tuple(loops), moved=(*plan.moved, *moved))


def _with_kernels(plan: CastPlan, ir: tvm.IRModule) -> CastPlan:
    """Return the plan of a step, or of the body of a loop, with the kernels that it gets."""
    lowered = _before_fusion(ir)
    found = assign_kernels(lowered)
    kernels = {variable: place.kernel for variable, place in found.items()}
    of_casts = frozenset(place.kernel for place in found.values() if place.only_casts)
    moved = traffic_by_reason(plan, lowered, stored_tensors(lowered), of_casts)
    return with_real_kernels(plan, ir, kernels, of_casts, moved)


def stored_variables(ir: tvm.IRModule) -> set[relax.Var]:
    """Return the variables of a step that its kernels and library calls write to memory."""
    stored = stored_tensors(_before_fusion(ir))
    return {one for tensor in stored if tensor.written_by is not None for one in tensor.variables}


def _before_fusion(ir: tvm.IRModule) -> tvm.IRModule:
    """Return what fusion is given: every library call written, casts folded."""
    ir = write_external_calls(ir, log=DispatchLog())
    return fold_casts(dispatch(fold_casts(_decomposed_for_fusion(ir))))
