# SPDX-License-Identifier: Apache-2.0
"""The public functions: they check their arguments and call the stages of pipeline.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import tvm
from tvm import relax

from amp_ir import pipeline
from amp_ir.amp import autocast as autocast_stage
from amp_ir.amp.cast_traffic import traffic_by_reason
from amp_ir.amp.plan import CastPlan
from amp_ir.amp.real_kernels import with_real_kernels
from amp_ir.capture import trace
from amp_ir.dispatch.decompose_attention import decompose_attention
from amp_ir.dispatch.decompose_recurrence import recurrence_as_calls
from amp_ir.dispatch.dispatch import dispatch
from amp_ir.dispatch.write_external_calls import write_external_calls
from amp_ir.errors import OptionError, UnsupportedOpError
from amp_ir.host.memory_limit import memory_for
from amp_ir.host.paused_garbage_collection import existing_objects_set_aside
from amp_ir.host.peak_rates import measure_peaks
from amp_ir.importer import import_step as importer
from amp_ir.ir.dispatch_log import DispatchLog
from amp_ir.ir.memory_plan import PlannedStep
from amp_ir.ir.options import (
    batch_of,
    check_budget,
    check_module,
    check_opt_level,
    check_rounding,
)
from amp_ir.ir.stages import Stage, each, seconds_by_stage, stage
from amp_ir.ir.step_module import Role, StepModule
from amp_ir.ir.target import parse_target, target_of
from amp_ir.loops.fusion.kernel_assignment import assign_kernels, stored_tensors
from amp_ir.loss_scaling.scale_loss import ScalerNotPassed, scalers_of
from amp_ir.memory.call_cost import flop_of_calls
from amp_ir.report.kernel_profile import GpuSteps, KernelProfile, profile_of
from amp_ir.report.memory import MemoryReport, report_memory
from amp_ir.report.program_text import program_text
from amp_ir.report.stage_files import current_stage_files
from amp_ir.rewrites.fold_casts import fold_casts
from amp_ir.runtime.call_times import time_calls
from amp_ir.runtime.launch_times import time_launches, time_whole_steps
from amp_ir.runtime.profile import time_program
from amp_ir.runtime.program import Program
from amp_ir.runtime.step import CompiledStep, CompileReport
from amp_ir.vm import build as build_stage

Models = torch.nn.Module | Sequence[torch.nn.Module]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


@existing_objects_set_aside()
@memory_for("the capture of the step needs")
def trace_step(
    step: Callable[..., Any],
    example_batch: tuple[Any, ...],
    *,
    model: Models,
    optimizer: Optimizers = None,
    scaler: Any = None,
    numbers_as_inputs: frozenset[str] = frozenset(),
) -> tuple[StepModule, tuple[Any, ...]]:
    """Capture a training step as you wrote it; nothing is run and nothing changes.

    Args:
        step: called as `step(*example_batch)`; may call `loss.backward()`, `optimizer.step()`,
            `zero_grad()`, clip, accumulate, and return anything made of tensors and constants.
        example_batch: the step's positional arguments; shapes and dtypes count, values do not.
        model: the module or modules that the step uses.
        optimizer: the optimizer or optimizers that the step calls.
        scaler: the `amp_ir.GradScaler` that the step uses, or a list of them; by default those
            of `amp_ir.scale_loss`, which makes one for each loss of an optimizer.
        numbers_as_inputs: names of Python numbers outside of the step, as the `changed_numbers` of
            an earlier capture's hooks gives them, and paths ("argument 2") of those among the
            arguments, that are to be read at every call.

    Returns:
        The step as a StepModule, and `example_batch`, ready for `autocast(mod, args)`.

    Raises:
        CaptureError: the step cannot be captured; the message lists every place.
        UnsupportedOpError: ops without a converter, all of them.
        LossScaleError: the loss scale reaches what must not depend on it; lists every place.
    """
    owners = {"model": model, "optimizer": optimizer}
    if scaler is not None:
        mod = _imported(step, example_batch, numbers_as_inputs, {**owners, "scaler": scaler})
    else:
        mod = _with_own_scalers(step, example_batch, numbers_as_inputs, owners)
    if mod.random_state is not None:
        mod = mod.with_random_state(mod.random_state.to(_device_of(mod)))
    return mod, example_batch


def _with_own_scalers(
    step: Callable[..., Any], batch: Any, numbers: frozenset[str], owners: dict[str, Any]
) -> StepModule:
    """Capture a step with the scalers that its `scale_loss` uses, which are made at its first call.

    A capture that meets a loss without a scaler ends there, and is begun again with one more.
    """
    optimizers = _optimizers(owners["optimizer"])
    while True:
        scalers = scalers_of(optimizers)
        try:
            return _imported(step, batch, numbers, {**owners, "scaler": scalers})
        except ScalerNotPassed as missing:
            if not any(missing.optimizer is one for one in optimizers):
                raise
            missing.make(_device_of_optimizer(missing.optimizer))


def _imported(
    step: Callable[..., Any], batch: Any, numbers: frozenset[str], owners: dict[str, Any]
) -> StepModule:
    """Capture and import a step; `numbers` are inputs where its ops can take them so."""
    import_step = functools.partial(
        pipeline.import_step, step, batch, on_stage=current_stage_files(), **owners
    )
    try:
        return import_step(numbers_as_inputs=numbers)
    except (UnsupportedOpError, TypeError, ValueError, RuntimeError) as error:
        if not numbers or isinstance(error, ScalerNotPassed):
            raise
        # Where an op takes one of the numbers as a constant only, they all stay guards. What has
        # nothing to do with them is raised again.
        return import_step(unfollowed=numbers)


def _device_of_optimizer(optimizer: torch.optim.Optimizer) -> torch.device:
    parameters: list[torch.Tensor] = optimizer.param_groups[0]["params"]
    return parameters[0].device


@existing_objects_set_aside()
def trace_model(
    model: torch.nn.Module, example_inputs: tuple[Any, ...]
) -> tuple[StepModule, tuple[Any, ...]]:
    """Capture the forward pass of a model, for inference; see `trace_step`."""
    captured = trace.capture_model(model, example_inputs)
    return importer.import_step(captured), example_inputs


@existing_objects_set_aside()
def autocast(
    mod: StepModule | tvm.IRModule, args: Any = None, *, verbose: bool = False, **options: Any
) -> Any:
    """Insert the casts of mixed precision; see `amp_ir.amp.autocast.autocast`.

    `verbose` prints every cast by the path of its module, as `mod.plan.list_casts()` has them.
    """
    if isinstance(mod, StepModule) and args is not None:
        batch_of(mod, args)
    before = mod.ir if isinstance(mod, StepModule) else mod
    with stage("amp", before, current_stage_files()) as running:
        found = autocast_stage.autocast(mod, args, find_kernels=_kernels_of, **options)
        running.program = found.ir if isinstance(found, StepModule) else found
    if verbose and isinstance(found, StepModule) and found.plan is not None:
        print(found.plan.list_casts())
    return found


def _kernels_of(ir: tvm.IRModule) -> dict[relax.Var, int]:
    """Find the kernel or library call that computes each variable; nothing is written."""
    found = assign_kernels(dispatch(_decomposed_for_fusion(ir)))
    return {variable: place.kernel for variable, place in found.items()}


def _decomposed_for_fusion(ir: tvm.IRModule) -> tvm.IRModule:
    """Return attention as its parts, and a recurrent layer as the one call that it is on a CPU."""
    return recurrence_as_calls(decompose_attention(ir))


def lower(mod: StepModule, **options: Any) -> PlannedStep:
    """Plan a step's kernels and library calls as `pipeline.lower` does, with checked options.

    Raises:
        OptionError: `rounding` or `memory_budget` is none that there is; see `compile_step`.
    """
    check_rounding(options.get("rounding", "fast"))
    check_budget(options.get("memory_budget"))
    with existing_objects_set_aside():
        return pipeline.lower(mod, **options)


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
    ir = write_external_calls(mod.ir, log=DispatchLog())
    ir = fold_casts(dispatch(fold_casts(_decomposed_for_fusion(ir))))
    found = assign_kernels(ir)
    kernels = {variable: place.kernel for variable, place in found.items()}
    of_casts = frozenset(place.kernel for place in found.values() if place.only_casts)
    moved = traffic_by_reason(mod.plan, ir, stored_tensors(ir), of_casts)
    return with_real_kernels(mod.plan, mod.ir, kernels, of_casts, moved)


@existing_objects_set_aside()
@memory_for("the compilation of the step needs")
def compile_step(
    mod: StepModule,
    *,
    device: str = "cpu",
    opt_level: int = 3,
    rounding: str = "fast",
    memory_budget: int | None = None,
) -> CompiledStep:
    """Compile a step (`amp_ir.compile`) so that it runs on the model's and optimizer's tensors.

    Args:
        mod: what `trace_step` or `autocast` returns.
        device: "cpu", or "cuda" ("cuda:1") where the model's tensors are on that GPU.
        opt_level: TVM's optimisation level, 0 to 3.
        rounding: "strict" rounds every low-precision value exactly where the plan says, also
            inside of fused kernels; "fast" rounds what is stored and keeps float32 in between.
            Casts that you wrote yourself (`x.bfloat16()`) round in both.
        memory_budget: the bytes that the step may need in all, as `get_peak_memory` counts them;
            values are computed again instead of held until it fits, and results stay
            bit-identical. Where that is not enough, the largest matmul is computed in 2, 4, 8 or 16
            chunks of its rows together with the loss on it and its gradients: what sums over rows
            (the loss, gradients of weights and biases) is then added up in another order and
            differs by float32 rounding; `report.plan.chunked_losses` and `memory_report` say so.
            None: nothing is computed twice or in chunks.

    Raises:
        OptionError, DeviceError, UnsupportedOpError.
        BudgetError: the budget cannot be held; the message says what can.
        OutOfMemoryError: this machine does not have the memory.
        IndexOutOfRangeError: an index is out of range whatever the batch is.
    """
    check_module(mod, "compile")
    check_opt_level(opt_level)
    target = target_of(device)
    seconds: dict[str, float] = {}
    timed = each(seconds_by_stage(seconds), current_stage_files())
    planned = lower(
        mod, target=target, rounding=rounding, memory_budget=memory_budget, on_stage=timed
    )
    with stage("vm", planned, seconds_by_stage(seconds)):
        executable = build_stage.build(planned, target, device, opt_level=opt_level)
    program = _program(executable, planned, mod, mod.state, device)
    options = {"device": device, "opt_level": opt_level, "rounding": rounding}
    options["memory_budget"] = memory_budget
    report = CompileReport(
        seconds, executable.kernel_count, planned.plan, planned.dispatched, options
    )
    text = functools.partial(
        text_after, mod, target=target, rounding=rounding, memory_budget=memory_budget
    )
    return CompiledStep(mod, program, report, text)


def text_after(mod: StepModule, name: str, **options: Any) -> str:
    """Lower the step once more, and return its program after the stage `name` as text.

    Raises:
        OptionError: no stage has that name.
    """
    records: dict[str, Stage] = {}
    with existing_objects_set_aside():
        pipeline.lower(mod, **options, on_stage=lambda one: records.update({one.name: one}))
    # What lowering began with: a step as autocast left it, or as it was captured.
    records = {"amp": Stage("amp", 0.0, None, mod.ir), **records}
    if name not in records:
        raise OptionError(
            f"ir({name!r}): there is no such stage; give one of {', '.join(records)}. For those "
            "before, set the environment variable AMP_IR_DUMP to a folder, which gets them all"
        )
    return program_text(records[name])


def profile_vm_model(
    mod: StepModule,
    device: str,
    args: tuple[Any, ...],
    *,
    opt_level: int = 3,
    warmup: int = 5,
    number: int = 10,
    repeat: int = 1,
    disable_fusion: bool = False,
    rounding: str = "fast",
    memory_budget: int | None = None,
) -> list[float]:
    """Return milliseconds a step: the mean of `number` steps, one entry for each of `repeat`.

    `rounding` and `memory_budget` are as for `compile`. `disable_fusion` makes a kernel of each op
    that is no view and no library call (a bias stays part of its matmul): what fusion gains is the
    difference. The steps run on copies of the state: parameters are as before afterwards.
    """
    check_module(mod, "profile_vm_model")
    options = {"rounding": rounding, "memory_budget": memory_budget}
    program, _, batch = _program_on_copies(
        mod, device, args, opt_level, disable_fusion=disable_fusion, **options
    )
    return time_program(program, batch, warmup=warmup, number=number, repeat=repeat)


def profile_kernels(
    mod: StepModule,
    device: str,
    args: tuple[Any, ...],
    *,
    steps: int = 10,
    warmup: int = 3,
    opt_level: int = 3,
    rounding: str = "fast",
    memory_budget: int | None = None,
) -> KernelProfile:
    """Time every kernel and library call of a step on this machine.

    Each with the modules it comes from, its phase, bytes, arithmetic and its share of the roofline,
    for which the device's peaks are measured once a process. `print` it, take `to_json()`, or
    `save_trace(path)` for ui.perfetto.dev. The steps run on copies of the state.

    On a GPU a call is timed by two CUDA events, in steps that are launched call by call;
    beside it stand the times of whole steps, as the CUDA graph that training runs and launched.

    Args:
        mod: what `trace_step` or `autocast` returns.
        device: "cpu", or "cuda" ("cuda:1") where the model's tensors are on that GPU.
        args: the example batch.
        steps: how many steps are timed; milliseconds are medians over them.
        warmup: how many steps run before.
        opt_level: as for `compile`.
        rounding: as for `compile`.
        memory_budget: as for `compile`.

    Raises:
        OptionError, DeviceError, ArgumentError, IndexOutOfRangeError, BudgetError.
    """
    check_module(mod, "profile_kernels")
    program, planned, batch = _program_on_copies(
        mod, device, args, opt_level, rounding=rounding, memory_budget=memory_budget
    )
    flop = flop_of_calls(planned)
    if not target_of(device).is_cuda:
        times = time_calls(program, batch, warmup=warmup, steps=steps)
        return profile_of(planned, flop, times, measure_peaks())
    whole = time_whole_steps(program, batch, warmup=warmup, repeat=steps)
    launches = time_launches(program, batch, warmup=warmup, steps=steps)
    gpu = GpuSteps(event_milliseconds=launches.event_milliseconds, **attrs.asdict(whole))
    return profile_of(planned, flop, launches.steps, measure_peaks(program.device), gpu)


def _program_on_copies(
    mod: StepModule, device: str, args: Any, opt_level: int, **options: Any
) -> tuple[Program, PlannedStep, list[torch.Tensor]]:
    """Return the step built on copies of its state, its plan, and the batch as tensors."""
    check_opt_level(opt_level)
    target = target_of(device)
    batch = batch_of(mod, args)
    planned = lower(mod, target=target, **options)
    executable = build_stage.build(planned, target, device, opt_level=opt_level)
    copies = dict(mod.state)
    for one in mod.signature.inputs:
        held = mod.state.get(one.name)
        if one.role is Role.GRADIENT and callable(held):
            held = held()
        if isinstance(held, torch.Tensor):
            copies[one.name] = held.detach().clone()
    program = _program(executable, planned, mod, copies, device)
    program.check_inputs(batch)
    return program, planned, batch


def _program(
    executable: Any, planned: PlannedStep, mod: StepModule, state: Any, device: str
) -> Program:
    signature = planned.signature(mod.signature)
    return Program(executable, planned.plan, signature, state, device, checks=planned.checks)


def get_peak_memory(
    mod: StepModule,
    device: str,
    args: Any = None,
    *,
    include_param: bool = True,
    rounding: str = "fast",
    memory_budget: int | None = None,
) -> float:
    """Return the peak MiB of a step, from the memory plan; nothing is executed.

    Counts intermediates, the libraries' workspace, the batch and results; with `include_param` also
    parameters, buffers, optimizer state and gradients that stay. `rounding` and `memory_budget` are
    as for `compile`. `memory_report` says what the bytes are.
    """
    check_module(mod, "get_peak_memory")
    target = parse_target(device)
    if args is not None:
        batch_of(mod, args)
    plan = lower(mod, target=target, rounding=rounding, memory_budget=memory_budget).plan
    nbytes = plan.peak_bytes if include_param else plan.peak_bytes - plan.state_bytes
    return nbytes / 2**20


def trace_memory(
    mod: StepModule,
    device: str,
    args: Any = None,
    *,
    include_param: bool = True,
    disable_fusion: bool = False,
    rounding: str = "fast",
    memory_budget: int | None = None,
) -> list[tuple[str, float]]:
    """Return the ops of each call of a step, in order, and the MiB alive while it runs.

    From the memory plan; nothing is executed. The largest is `get_peak_memory` less the gaps that
    the plan leaves between tensors. Options are those of `get_peak_memory`; `disable_fusion` makes
    a call of each op, as for `profile_vm_model`. The name is RAF's.
    """
    check_module(mod, "trace_memory")
    if args is not None:
        batch_of(mod, args)
    options = {"rounding": rounding, "memory_budget": memory_budget}
    target = parse_target(device)
    plan = lower(mod, target=target, disable_fusion=disable_fusion, **options).plan
    fixed = plan.peak_bytes - plan.arena_bytes - (0 if include_param else plan.state_bytes)
    live = zip(plan.calls, plan.live_bytes, strict=True)
    return [(", ".join(call.ops), (fixed + nbytes) / 2**20) for call, nbytes in live]


def get_param_size(mod: StepModule) -> float:
    """Return the MiB of a step's parameters, a tied one once; the name is RAF's."""
    check_module(mod, "get_param_size")
    owned = [one.name for one in mod.signature.inputs if one.role is Role.PARAMETER]
    tensors = [mod.state[name] for name in owned]
    return sum(one.nbytes for one in tensors if isinstance(one, torch.Tensor)) / 2**20


def get_gflops(mod: StepModule, device: str = "cpu", args: Any = None) -> float:
    """Return the arithmetic of one step in 10^9 operations, counted in the program for a device.

    2 for a multiply-add of a matmul or convolution, 1 for an addition, product, division, maximum
    or function such as exp in a kernel; nothing is executed. `profile_kernels` has it call by call.
    """
    check_module(mod, "get_gflops")
    if args is not None:
        batch_of(mod, args)
    return sum(flop_of_calls(lower(mod, target=parse_target(device)))) / 1e9


def memory_report(
    mod: StepModule,
    args: Any = None,
    *,
    baseline: StepModule | None = None,
    device: str = "cpu",
    rounding: str = "fast",
    memory_budget: int | None = None,
) -> MemoryReport:
    """Report what a step holds in memory, when and why: `print` it, or take `to_json()`.

    Args:
        mod: what `trace_step` or `autocast` returns; nothing is executed.
        args: the example batch, checked where it is given.
        baseline: the step before `autocast`; the report then says what AMP saved and cost.
        device: "cpu", "cuda" or an architecture ("sm_90"), which need not be here.
        rounding: as for `compile`.
        memory_budget: as for `compile`; not for `baseline`.

    Raises:
        OptionError: `mod` or `baseline` is no StepModule, or no device has that name.
        BudgetError: the budget cannot be held.
    """
    check_module(mod, "memory_report")
    if args is not None:
        batch_of(mod, args)
    if baseline is not None:
        check_module(baseline, "memory_report(baseline=...)")
    target = parse_target(device)
    before = None if baseline is None else lower(baseline, target=target, rounding=rounding).plan
    planned = lower(mod, target=target, rounding=rounding, memory_budget=memory_budget)
    return report_memory(planned.plan, before)


def _optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers among what was passed; what is none is refused later."""
    given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    return [one for one in given if isinstance(one, torch.optim.Optimizer)]


def _device_of(mod: StepModule) -> torch.device:
    """Return where the model's tensors are; the CPU for a step without any."""
    owned = (Role.PARAMETER, Role.BUFFER)
    tensors = [mod.state[spec.name] for spec in mod.signature.inputs if spec.role in owned]
    return next((one.device for one in tensors if torch.is_tensor(one)), torch.device("cpu"))
