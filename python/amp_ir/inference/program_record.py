# SPDX-License-Identifier: Apache-2.0
"""One program of a model file: IR, signature, plan and machine code, written and read back."""

from __future__ import annotations

import ctypes
import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
import tvm
from tvm import relax

from amp_ir.amp.plan import CastPlan
from amp_ir.api import compile_into, lower, text_after
from amp_ir.capture.batch import Arguments, structures_of
from amp_ir.errors import OptionError
from amp_ir.files.atomic_file import write_bytes
from amp_ir.host import native
from amp_ir.inference.plan_record import plan_from_json, plan_to_json
from amp_ir.inference.structure import (
    arguments_from_json,
    arguments_to_json,
    results_from_json,
    results_to_json,
)
from amp_ir.ir.executable import Executable
from amp_ir.ir.step_module import InputSpec, OutputSpec, Role, Signature, StepModule
from amp_ir.ir.target import CompileTarget, target_of
from amp_ir.rewrites.check_indices import check_indices
from amp_ir.runtime.arena import Arena
from amp_ir.runtime.program import Program
from amp_ir.runtime.step import CompiledStep, CompileReport
from amp_ir.standalone import LAUNCH_ADDRESS, SET_LAUNCH
from amp_ir.vm.build import compile_executable, host_description
from amp_ir.vm.export import linked_library

_NATIVE = "amp_ir."


@attrs.frozen
class ProgramRecord:
    """`description` is JSON; `ir` is TVM's own, and `library` a shared library."""

    description: dict[str, Any]
    ir: str
    library: bytes


def record_program(mod: StepModule, options: Mapping[str, Any], path: Path) -> ProgramRecord:
    """Compile a program for a file at `path`.

    Raises:
        OptionError: it leaves gradients behind, or takes or returns what a file cannot hold.
        BuildError: there is no linker.
    """
    _refuse_gradients(mod)
    arguments, results = structures_of(mod.signature)
    target = target_of(options["device"])
    lowering = {name: options[name] for name in ("rounding", "memory_budget")}
    planned = lower(mod, target=target, **lowering)
    executable = compile_executable(planned, target, opt_level=options["opt_level"])
    symbols = {call.symbol for call in planned.plan.calls if call.symbol.startswith(_NATIVE)}
    kernels = sum(isinstance(one, tvm.tirx.PrimFunc) for one in planned.ir.functions.values())
    description = {
        "inputs": [_spec_to_json(one) for one in mod.signature.inputs],
        "outputs": [_spec_to_json(one) for one in mod.signature.outputs],
        "arguments": arguments_to_json(arguments),
        "results": results_to_json(results),
        "options": dict(options),
        "machine": _machine(target),
        "functions": sorted(symbols),
        "kernel_count": kernels,
        "memory": plan_to_json(planned.plan),
        "plan": None if mod.plan is None else mod.plan.to_json(),
        "notes": list(mod.notes),
    }
    return ProgramRecord(description, tvm.ir.save_json(mod.ir), linked_library(executable, path))


def read_module(
    record: ProgramRecord, tensors: Mapping[str, torch.Tensor], device: str
) -> StepModule:
    """Return the program as IR, on these tensors of the device."""
    data = record.description
    inputs = tuple(
        InputSpec(one["name"], Role(one["role"]), tuple(one["shape"]), one["dtype"])
        for one in data["inputs"]
    )
    outputs = tuple(
        OutputSpec(
            one["name"], Role(one["role"]), tuple(one["shape"]), one["dtype"], one["updates"]
        )
        for one in data["outputs"]
    )
    arguments = Arguments.of(arguments_from_json(data["arguments"], device))
    results = results_from_json(data["results"])
    return StepModule(
        ir=tvm.ir.load_json(record.ir),
        signature=Signature(inputs, outputs, arguments.flatten, results.build),
        state={one.name: tensors[one.name] for one in inputs if one.is_state},
        notes=tuple(data["notes"]),
        plan=None if data["plan"] is None else CastPlan.from_json(data["plan"]),
    )


def load_program(record: ProgramRecord, mod: StepModule, device: str, arena: Arena) -> CompiledStep:
    """Return the program, ready to run; compiled again if its machine code is for another CPU."""
    data = record.description
    options = {**data["options"], "device": device}
    target = target_of(device)
    has_all = all(map(native.has, data["functions"]))
    if data["machine"] != _machine(target) or not has_all:
        return compile_into(arena, mod, **options)
    checked = check_indices(mod.ir, mod.signature, on_host="none" if target.is_cuda else "all")
    plan = plan_from_json(data["memory"])
    executable = _executable(record.library, target, device, data["kernel_count"])
    program = Program(
        executable, plan, checked.signature, mod.state, device, checks=checked.checks, arena=arena
    )
    lowering = {name: options[name] for name in ("rounding", "memory_budget")}
    text = functools.partial(text_after, mod, target=target, **lowering)
    report = CompileReport({}, data["kernel_count"], plan, options=options)
    return CompiledStep(mod, program, report, text)


def _executable(library: bytes, target: CompileTarget, device: str, kernels: int) -> Executable:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.so"
        write_bytes(path, library)
        module = tvm.runtime.load_module(str(path))
    if not target.is_cuda and native.has(LAUNCH_ADDRESS):
        set_launch = module.get_function(SET_LAUNCH, query_imports=True)
        set_launch(ctypes.c_void_p(native.function(LAUNCH_ADDRESS)()))
    tvm_device = tvm.device(device)
    vm = relax.VirtualMachine(module, tvm_device)
    return Executable(vm, tvm_device, kernels, relax.VMExecutable(module))


def _machine(target: CompileTarget) -> str:
    return host_description() if not target.is_cuda else str(target)


def _spec_to_json(one: InputSpec | OutputSpec) -> dict[str, Any]:
    return {**attrs.asdict(one), "role": one.role.value}


def _refuse_gradients(mod: StepModule) -> None:
    specs: list[InputSpec | OutputSpec] = [*mod.signature.inputs, *mod.signature.outputs]
    names = sorted({one.name for one in specs if one.role is Role.GRADIENT})
    if names:
        raise OptionError(
            f"the step reads or leaves the gradients {', '.join(names[:3])}"
            f"{', ...' if len(names) > 3 else ''}, which belong to a model, and a file has none; "
            "clear them at the end of the step"
        )
