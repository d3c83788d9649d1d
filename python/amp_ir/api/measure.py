# SPDX-License-Identifier: Apache-2.0
"""Time and memory of a step: measured on copies of its state, or read from its memory plan."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from amp_ir.api.compile import lower, program_of
from amp_ir.host.peak_rates import measure_peaks
from amp_ir.ir.memory_plan import PlannedStep
from amp_ir.ir.options import batch_of, check_module, check_opt_level
from amp_ir.ir.public_function import public_function
from amp_ir.ir.step_module import Role, StepModule
from amp_ir.ir.target import parse_target, target_of
from amp_ir.memory.call_cost import flop_of_calls
from amp_ir.report.kernel_profile import GpuSteps, KernelProfile, profile_of
from amp_ir.report.memory import MemoryReport, report_memory
from amp_ir.runtime.call_times import time_calls
from amp_ir.runtime.launch_times import time_launches, time_whole_steps
from amp_ir.runtime.profile import time_program
from amp_ir.runtime.program import Program
from amp_ir.vm import build as build_stage
from amp_ir.vm.open_kernels import open_kernels


@public_function("amp_ir.profile_vm_model")
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
    recompute: bool = True,
) -> list[float]:
    """Return milliseconds a step: the mean of `number` steps, one entry for each of `repeat`.

    `rounding`, `memory_budget` and `recompute` are as for `compile`. `disable_fusion` makes a
    kernel of each op that is neither a view nor a library call (a bias stays part of its matmul):
    what fusion gains is the difference. The steps run on copies of the state: parameters are as
    before afterwards.
    """
    check_module(mod, "profile_vm_model")
    options = {"rounding": rounding, "memory_budget": memory_budget, "recompute": recompute}
    program, _, batch = program_on_copies(
        mod, device, args, opt_level, disable_fusion=disable_fusion, **options
    )
    return time_program(program, batch, warmup=warmup, number=number, repeat=repeat)


@public_function("amp_ir.profile_kernels")
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
    recompute: bool = True,
) -> KernelProfile:
    """Time every kernel and library call of a step on this machine.

    Each with the modules it comes from, its phase, bytes, arithmetic and its share of the roofline,
    for which the device's peaks are measured once a process. `print` it, take `to_json()`, or
    `save_trace(path)` for ui.perfetto.dev. The steps run on copies of the state.

    On a GPU a call is timed by two CUDA events, in steps that are launched call by call;
    the profile also has the times of whole steps, launched as the CUDA graph of training.

    A step of several ranks is timed on all of them at once: every rank calls this alike.

    Args:
        mod: what `trace_step` or `autocast` returns.
        device: "cpu", or "cuda" ("cuda:1") where the model's tensors are on that GPU.
        args: the example batch.
        steps: how many steps are timed; milliseconds are medians over them.
        warmup: how many steps run before.
        opt_level: as for `compile`.
        rounding: as for `compile`.
        memory_budget: as for `compile`.
        recompute: as for `compile`.

    Raises:
        OptionError: an option has a value that it does not accept.
        DeviceError: the device is not there, or not the one that the model is on.
        ArgumentError: `args` are not like the example batch.
        IndexOutOfRangeError: an index is out of range; nothing is timed.
        BudgetError: the budget cannot be held.
    """
    check_module(mod, "profile_kernels")
    options = {"rounding": rounding, "memory_budget": memory_budget, "recompute": recompute}
    program, planned, batch = program_on_copies(mod, device, args, opt_level, **options)
    flop = flop_of_calls(planned)
    if not target_of(device).is_cuda:
        peaks = measure_peaks()
        exchange = program.exchange
        if exchange is not None:
            exchange.is_timed = True
        times = time_calls(program, batch, warmup=warmup, steps=steps)
        traffic = [] if exchange is None else exchange.traffic[-steps:]
        return profile_of(planned, flop, times, peaks, traffic=traffic)
    whole = time_whole_steps(program, batch, warmup=warmup, repeat=steps)
    launches = time_launches(program, batch, warmup=warmup, steps=steps)
    gpu = GpuSteps(event_milliseconds=launches.event_milliseconds, **attrs.asdict(whole))
    return profile_of(planned, flop, launches.steps, measure_peaks(program.device), gpu)


def program_on_copies(
    mod: StepModule, device: str, args: Any, opt_level: int, **options: Any
) -> tuple[Program, PlannedStep, list[torch.Tensor]]:
    """Return the step built on copies of its state, its plan, and the batch as tensors.

    The kernels of the plan have their extents, from which their arithmetic is counted.
    """
    check_opt_level(opt_level)
    target = target_of(device)
    batch = batch_of(mod, args)
    planned = lower(mod, target=target, **options)
    built = planned if target.is_cuda else open_kernels(planned)
    executable = build_stage.build(built, target, device, opt_level=opt_level)
    program = program_of(executable, built, mod, mod.copied_state(), device)
    program.check_inputs(batch)
    return program, planned, batch


@public_function("amp_ir.get_peak_memory")
def get_peak_memory(
    mod: StepModule,
    device: str | torch.device,
    args: Any = None,
    *,
    include_param: bool = True,
    rounding: str = "fast",
    memory_budget: int | None = None,
    recompute: bool = True,
) -> float:
    """Return the peak MiB of a step, from the memory plan; nothing is executed.

    Counts intermediates, the libraries' workspace, the batch and results; with `include_param` also
    parameters, buffers, optimizer state and gradients that stay. `rounding`, `memory_budget` and
    `recompute` are as for `compile`. `memory_report` says what the bytes are.
    """
    check_module(mod, "get_peak_memory")
    target = parse_target(device)
    if args is not None:
        batch_of(mod, args)
    options = {"rounding": rounding, "memory_budget": memory_budget, "recompute": recompute}
    plan = lower(mod, target=target, **options).plan
    nbytes = plan.peak_bytes if include_param else plan.peak_bytes - plan.state_bytes
    return nbytes / 2**20


@public_function("amp_ir.trace_memory")
def trace_memory(
    mod: StepModule,
    device: str,
    args: Any = None,
    *,
    include_param: bool = True,
    disable_fusion: bool = False,
    rounding: str = "fast",
    memory_budget: int | None = None,
    recompute: bool = True,
) -> list[tuple[str, float]]:
    """Return the ops of each call of a step, in order, and the MiB alive while it runs.

    From the memory plan; nothing is executed. The largest is `get_peak_memory` less the gaps that
    the plan leaves between tensors. Options are those of `get_peak_memory`; `disable_fusion` makes
    a call of each op, as for `profile_vm_model`. The name is RAF's.
    """
    check_module(mod, "trace_memory")
    if args is not None:
        batch_of(mod, args)
    options = {"rounding": rounding, "memory_budget": memory_budget, "recompute": recompute}
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


@public_function("amp_ir.memory_report")
def memory_report(
    mod: StepModule,
    args: Any = None,
    *,
    baseline: StepModule | None = None,
    device: str = "cpu",
    rounding: str = "fast",
    memory_budget: int | None = None,
    recompute: bool = True,
) -> MemoryReport:
    """Report what a step holds in memory, when and why: `print` it, or take `to_json()`.

    Args:
        mod: what `trace_step` or `autocast` returns; nothing is executed.
        args: the example batch, checked where it is given.
        baseline: the step before `autocast`; the report then says what AMP saved and cost.
        device: "cpu", "cuda" or an architecture ("sm_90"), which need not be here.
        rounding: as for `compile`.
        memory_budget: as for `compile`; not for `baseline`.
        recompute: as for `compile`.

    Raises:
        OptionError: `mod` or `baseline` is not a StepModule, or no device has that name.
        BudgetError: the budget cannot be held.
    """
    check_module(mod, "memory_report")
    if args is not None:
        batch_of(mod, args)
    if baseline is not None:
        check_module(baseline, "memory_report(baseline=...)")
    target = parse_target(device)
    options = {"target": target, "rounding": rounding, "recompute": recompute}
    before = None if baseline is None else lower(baseline, **options).plan
    planned = lower(mod, memory_budget=memory_budget, **options)
    return report_memory(planned.plan, before)
