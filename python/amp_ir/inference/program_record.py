# SPDX-License-Identifier: Apache-2.0
"""One program of a model file: IR, signature, plan and machine code, written and read back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
import tvm

from amp_ir.amp.plan import CastPlan
from amp_ir.api import compile_into, lower, step_of_built
from amp_ir.capture.batch import Arguments, structures_of
from amp_ir.errors import OptionError
from amp_ir.host import native
from amp_ir.inference.structure import (
    arguments_from_json,
    arguments_to_json,
    names_from_json,
    names_to_json,
    results_from_json,
    results_to_json,
)
from amp_ir.ir.built_step import BuiltStep
from amp_ir.ir.options import lowering_options
from amp_ir.ir.step_module import InputSpec, OutputSpec, Role, Signature, StepModule
from amp_ir.ir.target import CompileTarget, target_of
from amp_ir.runtime.arena import Arena
from amp_ir.runtime.step import CompiledStep
from amp_ir.vm.build import compile_executable, count_kernels, host_description
from amp_ir.vm.export import linked_library
from amp_ir.vm.load import load_library

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
    planned = lower(mod, target=target, **lowering_options(options))
    executable = compile_executable(planned, target, opt_level=options["opt_level"])
    symbols = {call.symbol for call in planned.plan.calls if call.symbol.startswith(_NATIVE)}
    library = linked_library(executable, path)
    built = BuiltStep(library, planned.plan, count_kernels(planned), planned.dispatched)
    description = {
        "inputs": [_spec_to_json(one) for one in mod.signature.inputs],
        "outputs": [_spec_to_json(one) for one in mod.signature.outputs],
        "arguments": arguments_to_json(arguments),
        "names": names_to_json(arguments.names),
        "results": results_to_json(results),
        "options": dict(options),
        "machine": _machine(target),
        "functions": sorted(symbols),
        **built.describe(),
        "plan": None if mod.plan is None else mod.plan.to_json(),
        "notes": list(mod.notes),
    }
    return ProgramRecord(description, tvm.ir.save_json(mod.ir), library)


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
    arguments = attrs.evolve(arguments, names=names_from_json(data.get("names")))
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
    built = BuiltStep.read(data, record.library)
    executable = load_library(built.library, target, device, built.kernel_count)
    return step_of_built(arena, mod, built, executable, target, options, {})


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
