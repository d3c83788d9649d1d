# SPDX-License-Identifier: Apache-2.0
"""Compilation: `lower` plans a step, `compile_step` makes it run."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from amp_ir import pipeline
from amp_ir.api.cached_build import cached_build
from amp_ir.api.replay import overflow_finder
from amp_ir.capture.patches.restores import between_captures
from amp_ir.errors import OptionError
from amp_ir.host.logs import logger_of
from amp_ir.host.memory_limit import memory_for
from amp_ir.host.paused_garbage_collection import paused_garbage_collection
from amp_ir.ir.built_step import BuiltStep
from amp_ir.ir.executable import Executable
from amp_ir.ir.memory_plan import MemoryPlan, PlannedStep
from amp_ir.ir.options import (
    check_budget,
    check_module,
    check_opt_level,
    check_rounding,
    lowering_options,
)
from amp_ir.ir.public_function import public_function
from amp_ir.ir.stages import Stage, each, seconds_by_stage, stage
from amp_ir.ir.step_module import StepModule
from amp_ir.ir.target import CompileTarget, target_of
from amp_ir.report.live_stage import live_stage
from amp_ir.report.stage_files import current_stage_files
from amp_ir.runtime.arena import Arena
from amp_ir.runtime.program import Program
from amp_ir.runtime.step import CompiledStep, CompileReport
from amp_ir.vm import build as build_stage
from amp_ir.vm.open_kernels import open_kernels

if TYPE_CHECKING:
    from amp_ir.distributed.exchange import Exchange

_plan, _dispatch, _memory = map(logger_of, ("plan", "dispatch", "memory"))


def log_compiled(mod: StepModule, report: CompileReport) -> None:
    """Log what AMP_IR_LOG shows of a compiled step, a short line each."""
    if mod.plan is not None and _plan.isEnabledFor(logging.INFO):
        for line in mod.plan.summary().splitlines()[:2]:
            _plan.info("%s", line)
    for note in report.dispatched:
        _dispatch.info("%s", note)
    plan = report.plan
    parts = {
        "arena": plan.arena_bytes, "state": plan.state_bytes, "batch": plan.batch_bytes,
        "results": plan.result_bytes, "libraries": plan.library_bytes,
    }  # fmt: skip
    text = ", ".join(f"{name} {nbytes / 2**20:.2f}" for name, nbytes in parts.items() if nbytes)
    _memory.info("peak %.2f MiB: %s", plan.peak_bytes / 2**20, text)


def lower(mod: StepModule, **options: Any) -> PlannedStep:
    """Plan a step's kernels and library calls as `pipeline.lower` does, with checked options.

    Raises:
        OptionError: `rounding`, `memory_budget` or `recompute` is none that there is; see
            `compile_step`.
    """
    check_rounding(options.get("rounding", "fast"))
    check_budget(options.get("memory_budget"), options.get("recompute", True))
    with paused_garbage_collection():
        return pipeline.lower(mod, **options)


@public_function("amp_ir.compile")
def compile_step(
    mod: StepModule,
    *,
    device: str = "cpu",
    opt_level: int = 3,
    rounding: str = "fast",
    memory_budget: int | None = None,
    recompute: bool = True,
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
            None: nothing is computed in chunks, and twice only what `recompute` allows.
        recompute: without a budget, on a CPU, a step with 32 MiB of intermediate values or more
            runs cheap calls again instead of holding their results, for up to 2 % of its estimated
            time, where that saves at least three times that share of the peak; the bits are the
            same. False: nothing is computed twice. `memory_report` says what is and what it saves.

    Raises:
        OptionError: an option has a value that it does not accept.
        DeviceError: the device is not there, or not the one that the model is on.
        UnsupportedOpError: an op cannot be compiled for this device.
        BudgetError: the budget cannot be held; the message says what can.
        OutOfMemoryError: this machine does not have the memory.
        IndexOutOfRangeError: an index is out of range whatever the batch is.
    """
    with live_stage("the step"):
        return compile_into(
            Arena(),
            mod,
            device=device,
            opt_level=opt_level,
            rounding=rounding,
            memory_budget=memory_budget,
            recompute=recompute,
        )


@paused_garbage_collection()
@memory_for("the compilation of the step needs")
def compile_into(
    arena: Arena,
    mod: StepModule,
    *,
    device: str = "cpu",
    opt_level: int = 3,
    rounding: str = "fast",
    memory_budget: int | None = None,
    recompute: bool = True,
    seconds_before: Mapping[str, float] | None = None,
) -> CompiledStep:
    """Do what `compile_step` does, for a program that shares its arena with others.

    `seconds_before` are those of what was done for it before, which its report has too.

    Raises:
        As `compile_step`.
    """
    check_module(mod, "compile")
    check_opt_level(opt_level)
    check_rounding(rounding)
    check_budget(memory_budget, recompute)
    target = target_of(device)
    options = {"device": device, "opt_level": opt_level, "rounding": rounding}
    options |= {"memory_budget": memory_budget, "recompute": recompute}
    started, seconds = time.perf_counter(), dict(seconds_before or {})
    # Whoever asks for the stages of a compilation wants one.
    files = current_stage_files()
    cached = None if files is not None else cached_build(mod, options, target)
    found = None if cached is None else cached.load(target, device)
    if found is not None:
        seconds["cache"] = time.perf_counter() - started
        return step_of_built(arena, mod, *found, target, options, seconds)
    planned = lower(
        mod,
        target=target,
        **lowering_options(options),
        on_stage=each(seconds_by_stage(seconds), files),
    )
    with stage("vm", planned, seconds_by_stage(seconds)):
        if not target.is_cuda:
            planned = open_kernels(planned)
        made = None if cached is None else cached.build(planned, target, device, opt_level)
        if made is None:
            executable = build_stage.build(planned, target, device, opt_level=opt_level)
        else:
            built, executable = made
        program = program_of(executable, planned, mod, mod.state, device, arena=arena)
    if cached is not None and made is not None:
        with stage("store", planned, seconds_by_stage(seconds)):
            cached.put(built)
    report = CompileReport(
        seconds, executable.kernel_count, planned.plan, planned.dispatched, options
    )
    return _step_of(mod, program, report, target)


def step_of_built(
    arena: Arena,
    mod: StepModule,
    built: BuiltStep,
    executable: Executable,
    target: CompileTarget,
    options: dict[str, Any],
    seconds: dict[str, float],
) -> CompiledStep:
    """Return a step that was built earlier, maybe by another process, on the tensors of `mod`.

    Requires: `built` is of the same program and options.

    Raises:
        StateError, OutOfMemoryError: as `compile_step`.
    """
    checked = pipeline.checked_step(mod, target)
    exchange = exchange_of(mod, built.plan, options["device"])
    with between_captures():
        program = Program(
            executable,
            built.plan,
            checked.signature,
            mod.state,
            options["device"],
            checks=checked.checks,
            arena=arena,
            exchange=exchange,
        )
    report = CompileReport(seconds, built.kernel_count, built.plan, built.dispatched, options)
    return _step_of(mod, program, report, target)


def _step_of(
    mod: StepModule, program: Program, report: CompileReport, target: CompileTarget
) -> CompiledStep:
    options = dict(report.options)
    finder = overflow_finder(mod, program, options["rounding"])
    log_compiled(mod, report)
    return CompiledStep(mod, program, report, _text(mod, target, options), finder)


def _text(mod: StepModule, target: CompileTarget, options: dict[str, Any]) -> Callable[[str], str]:
    return functools.partial(text_after, mod, target=target, **lowering_options(options))


def text_after(mod: StepModule, name: str, **options: Any) -> str:
    """Lower the step once more, and return its program after the stage `name` as text.

    Raises:
        OptionError: no stage has that name.
    """
    records: dict[str, Stage] = {}
    with paused_garbage_collection():
        pipeline.lower(mod, **options, on_stage=lambda one: records.update({one.name: one}))
    # What lowering began with: a step as autocast left it, or as it was captured.
    records = {"amp": Stage("amp", 0.0, None, mod.ir), **records}
    if name not in records:
        raise OptionError(
            f"ir({name!r}): there is no such stage; give one of {', '.join(records)}. For those "
            "before, set the environment variable AMP_IR_DUMP to a folder, which gets them all"
        )
    from amp_ir.report.program_text import program_text

    return program_text(records[name])


def program_of(
    executable: Any,
    planned: PlannedStep,
    mod: StepModule,
    state: Any,
    device: str,
    *,
    arena: Arena | None = None,
) -> Program:
    """Return the built step on the tensors of `state`; by default with an arena of its own."""
    signature, checks = planned.signature(mod.signature), planned.checks
    exchange = exchange_of(mod, planned.plan, device)
    # It looks at the state, in a thread where the batch was announced.
    with between_captures():
        return Program(
            executable,
            planned.plan,
            signature,
            state,
            device,
            checks=checks,
            arena=arena,
            exchange=exchange,
        )


def exchange_of(mod: StepModule, plan: MemoryPlan, device: str) -> Exchange | None:
    """Return what a step exchanges with other ranks; None where it exchanges nothing."""
    ranks = mod.hooks.ranks
    if ranks is None or not ranks.exchanges:
        return None
    # On demand, as all that is for several ranks alone.
    from amp_ir.api.exchange import exchange_between

    return exchange_between(ranks, mod, plan, is_cuda=target_of(device).is_cuda)
