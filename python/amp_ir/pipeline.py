# SPDX-License-Identifier: Apache-2.0
"""The stages that take a training step from PyTorch to machine code. Read this first.

    capture       capture/       run the step once on fake tensors -> FX graph of ATen ops
    import        importer/      -> StepModule: Relax IR, named state, signature
    collectives   rewrites/      of several ranks: each bucket of gradients is begun and waited for
    loss_scaling  loss_scaling/  every use of a loss scale has the right degree, or an error
    rewrites      rewrites/      matmuls summed or of copies -> one, or batches; losses -> whole
    amp           amp/           rules and placement choose dtypes -> casts
    checks        rewrites/      indices that may be out of range are checked, on the host or inside
    dispatch      dispatch/      what a library computes -> calls of it; the rest is decomposed
    loops         loops/         everything else -> few kernels
    memory        memory/        one arena of bytes; results written where they belong
    vm            vm/            -> executable of TVM's virtual machine
    run           runtime/       on the user's own tensors

A stage imports no other stage; this file joins them, and api/ calls it. What few steps need, as for
a GPU or for several ranks, is imported where it runs.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import attrs
import tvm

import amp_ir.dialect  # noqa: F401  (registers the ops)
from amp_ir.capture import trace
from amp_ir.dispatch.accumulate_matmuls import accumulate_matmuls
from amp_ir.dispatch.decompose import decompose
from amp_ir.dispatch.dispatch import dispatch
from amp_ir.dispatch.hoist_packs import PackHoister
from amp_ir.dispatch.lower_loops import log_unrolled, lower_loops
from amp_ir.dispatch.move_matmuls import move_matmuls
from amp_ir.dispatch.prepack_weights import prepack_weights
from amp_ir.importer import import_step as importer
from amp_ir.ir.captured_step import CapturedStep
from amp_ir.ir.dispatch_log import DispatchLog
from amp_ir.ir.memory_plan import PlannedStep
from amp_ir.ir.stages import OnStage, stage
from amp_ir.ir.step_module import InputSpec, Role, StepModule
from amp_ir.ir.target import CompileTarget, cpu
from amp_ir.loops.write_kernels import emitter_of, merger_of, write_kernels
from amp_ir.memory.plan_memory import plan_memory
from amp_ir.rewrites.batch_merged_axes import batch_merged_axes
from amp_ir.rewrites.check_indices import CheckedStep, HostChecks, check_indices
from amp_ir.rewrites.concat_matmuls import concat_matmuls
from amp_ir.rewrites.fold_casts import fold_casts
from amp_ir.rewrites.loops_to_unroll import unroll_unsupported
from amp_ir.rewrites.order_in_memory import order_in_memory
from amp_ir.rewrites.unroll_loops import unroll_loops
from amp_ir.rewrites.unslice_loss import unslice_loss


def import_step(
    step: Callable[..., Any], example_batch: Any, *, on_stage: OnStage | None = None, **options: Any
) -> StepModule:
    """Take a step from Python to a StepModule that `rewrite`, autocast and `lower` accept.

    `options` are those of `capture_step`: the model, the optimizer, the scaler, and which numbers
    are inputs. Nothing is executed, and the user's objects stay as they are.
    """
    with stage("capture", None, on_stage) as running:
        captured = trace.capture_step(step, example_batch, **options)
        running.program = captured.graph
    with stage("import", captured.graph, on_stage) as running:
        mod = import_captured(captured)
        running.program = mod.ir
    if captured.hooks.ranks is not None:
        with stage("collectives", mod.ir, on_stage) as running:
            # From here on gradients are exchanged in buckets, each begun and waited for.
            from amp_ir.rewrites.exchange_gradients import exchange_gradients

            running.program = (mod := exchange_gradients(mod)).ir
    with stage("loss_scaling", mod.ir, on_stage) as running:
        if any(one.role is Role.SCALER_STATE for one in mod.signature.inputs):
            from amp_ir.loss_scaling.degrees.check_scale_degrees import check_scale_degrees

            degrees = check_scale_degrees(mod, unroll_loops)
            mod = attrs.evolve(mod, notes=(*mod.notes, *degrees.notes))
        running.program = mod.ir
    return mod


def import_captured(captured: CapturedStep) -> StepModule:
    """Import a captured step; the loops that no later stage can do are unrolled, and noted."""
    mod = importer.import_step(captured)
    ir, unrolled = unroll_unsupported(mod.ir)
    return attrs.evolve(mod.with_ir(ir), notes=(*mod.notes, *unrolled))


def rewrite(mod: StepModule, *, on_stage: OnStage | None = None) -> StepModule:
    """Take a step from the ops that were captured to those that run; see rewrites/."""
    with stage("rewrites", mod.ir, on_stage) as running:
        # Before autocast, whose rules and plan are to speak of the ops that run.
        running.program = unslice_loss(batch_merged_axes(concat_matmuls(mod.ir)))
    return mod.with_ir(running.program)


def lower(
    mod: StepModule,
    *,
    target: CompileTarget | None = None,
    rounding: str = "fast",
    memory_budget: int | None = None,
    recompute: bool = True,
    disable_fusion: bool = False,
    host_checks: HostChecks | None = None,
    hoist: PackHoister | None = None,
    on_stage: OnStage | None = None,
) -> PlannedStep:
    """Take a step from ops to planned kernels and library calls.

    `target` is what the kernels are for; None: this machine's CPU. `host_checks` says which indices
    the caller checks before a step; None: all that it can on a CPU, and none on a GPU.
    `disable_fusion` makes a kernel of each op. `on_stage` gets the record of each stage, and with a
    budget of each plan that is tried. `hoist` takes what every step of a loop does alike out of
    the loop's body. api/ checks the other options.

    Ensures: the user's state is untouched, and nothing has been executed.

    Raises:
        BudgetError: `memory_budget` bytes cannot be held.
        IndexOutOfRangeError: an index is out of range whatever the batch is.
    """
    target = target or cpu()
    is_cuda, log = target.is_cuda, DispatchLog()
    if is_cuda:
        # A loop's body is called by the host.
        log_unrolled(mod.ir, log)
        mod = mod.with_ir(unroll_loops(mod.ir))
    with stage("checks", mod.ir, on_stage) as running:
        # From here on a step whose indices are not all known is a transaction.
        checked = checked_step(mod, target, host_checks)
        # From here on inputs and outputs have the extents of memory.
        running.program = ordered = order_in_memory(checked.ir, checked.signature)
    with stage("decompose", ordered, on_stage) as running:
        # From here on attention and recurrent layers are library calls or smaller ops.
        lower_body = functools.partial(
            lower,
            target=target,
            rounding=rounding,
            recompute=recompute,
            disable_fusion=disable_fusion,
        )
        # A packed weight is a copy, for which a budget has no memory.
        ir, bodies = lower_loops(ordered, lower_body, log, packs=memory_budget is None)
        ir = running.program = fold_casts(decompose(ir, target, log))

    def plan(ir: tvm.IRModule, *, in_chunks: bool) -> PlannedStep:
        own_log, inputs = copy.deepcopy(log), checked.signature.inputs
        with stage("dispatch", ir, on_stage) as running:
            # From here on heavy ops are library calls, opaque to fusion.
            ir, hoisted = library_calls(
                ir, checked.signature.outputs, target, own_log, in_chunks=in_chunks, hoist=hoist
            )
            running.program, inputs = ir, (*inputs, *hoisted)
        with stage("loops", ir, on_stage) as running:
            # From here on there are kernels, and low precision exists only in memory.
            is_strict = rounding == "strict"
            running.program = ir = write_kernels(
                ir, is_cuda=is_cuda, is_strict=is_strict, disable_fusion=disable_fusion
            )
        with stage("memory", ir, on_stage) as running:
            # From here on every value has its bytes, and order must not change.
            running.program = planned = plan_memory(
                ir,
                inputs,
                checked.signature.outputs,
                copy_kernel=emitter_of(is_cuda=is_cuda).emit_copy,
                merger=None if disable_fusion else merger_of(is_cuda=is_cuda),
                memory_budget=memory_budget,
                bodies=bodies,
                # A GPU's state is written as the queue comes to it.
                keeps_state=not is_cuda,
                reruns_cheaply=recompute and not is_cuda,
            )
        return attrs.evolve(planned, dispatched=own_log.notes)

    if memory_budget is None:
        planned = plan(ir, in_chunks=False)
    else:
        # Where running calls again cannot hold the budget a loss is computed in chunks of rows.
        from amp_ir.memory.chunking.chunk_loss import plan_in_chunks

        planned = plan_in_chunks(ir, plan)
    outputs = checked.signature.outputs if checked.checks.in_step else None
    return attrs.evolve(planned, checks=checked.checks, outputs=outputs)


def checked_step(
    mod: StepModule, target: CompileTarget, host_checks: HostChecks | None = None
) -> CheckedStep:
    """Return the step with its checks of indices, as `lower` does; `host_checks` as there."""
    on_host = host_checks or ("none" if target.is_cuda else "all")
    return check_indices(mod.ir, mod.signature, on_host=on_host)


def library_calls(
    ir: tvm.IRModule,
    outputs: Any,
    target: CompileTarget,
    log: DispatchLog,
    *,
    in_chunks: bool,
    hoist: PackHoister | None = None,
) -> tuple[tvm.IRModule, tuple[InputSpec, ...]]:
    """Write the library calls of a step, with what they fold in: biases, packing, sums.

    Returns the inputs that it then has more, with `hoist`.
    """
    # In chunks, rows of the loss are written where whole tensors would be.
    if target.is_cuda and not in_chunks:
        from amp_ir.rewrites.align_matmuls import align_matmuls

        ir = align_matmuls(ir, allow_tf32=target.allow_tf32)
    ir = dispatch(ir, libraries=target.libraries, allow_tf32=target.allow_tf32, log=log)
    # Matmuls that add a bias round once, so casts around the sum fold away.
    ir = fold_casts(ir)
    ir, hoisted = (ir, ()) if hoist is None else hoist(ir, log)
    # A packed matrix is a copy, which the matmuls of a loss in chunks have no memory for.
    ir = ir if in_chunks else prepack_weights(ir, log=log)
    ir = accumulate_matmuls(ir, outputs, log=log)
    if target.takes_fastest:
        ir = move_matmuls(ir, target.libraries, log=log)
    return ir, hoisted
