# SPDX-License-Identifier: Apache-2.0
"""`amp_ir.examine`: what of a step is compiled, and what is not, without running it."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from typing import Any

import torch
import tvm
from tvm import relax

from amp_ir.api.trace import Models, Optimizers, trace_step
from amp_ir.errors import ArgumentError, CaptureError, LossScaleError, UnsupportedOpError
from amp_ir.ir.dataflow import Dataflow, op_name
from amp_ir.ir.external_call import read_external
from amp_ir.ir.location import from_span
from amp_ir.ir.public_function import public_function
from amp_ir.ir.static_shape import shape_of
from amp_ir.report.examination import Examination, ExaminedOp, refused_places
from amp_ir.report.step_name import step_name
from amp_ir.version import VERSION
from amp_ir.vm.build import host_description

_REFUSALS = (ArgumentError, CaptureError, LossScaleError, UnsupportedOpError)


@public_function("amp_ir.examine")
def examine(
    step: Callable[..., Any],
    example_batch: tuple[Any, ...],
    *,
    model: Models,
    optimizer: Optimizers = None,
    scaler: Any = None,
) -> Examination:
    """Say what of a step amp_ir compiles, what stays PyTorch's own op, and what is refused.

    Nothing is run and nothing changes. `print` the result, or take `to_json()` or `issue_text()`.

    Args:
        step: as for `trace_step`, as are all others.
        example_batch: the step's arguments.
        model: the module or modules that the step uses.
        optimizer: the optimizer or optimizers that it calls.
        scaler: its GradScaler, or a list of them.
    """
    name, machine = step_name(step), _machine()
    owners = {"model": model, "optimizer": optimizer, "scaler": scaler}
    try:
        mod, _ = trace_step(step, example_batch, **owners)
    except _REFUSALS as error:
        return Examination(name, (), refused_places(error), machine=machine)
    return Examination(name, tuple(_ops_of(mod.ir)), (), mod.notes, machine)


def _ops_of(ir: tvm.IRModule) -> Iterable[ExaminedOp]:
    calls: dict[tuple[str, bool], list[relax.VarBinding]] = {}
    for binding in Dataflow(ir).bindings:
        if isinstance(binding.value, relax.Call):
            external = read_external(binding.value)
            name = op_name(binding.value) if external is None else external.op
            calls.setdefault((name, external is not None), []).append(binding)
    for (name, is_external), bindings in calls.items():
        places = dict.fromkeys(str(from_span(one.value.span)) for one in bindings)
        nbytes = sum(map(_nbytes, bindings))
        yield ExaminedOp(name, is_external, len(bindings), nbytes, tuple(places))


def _nbytes(binding: relax.VarBinding) -> int:
    """Return the bytes that a call reads and writes."""
    return sum(_nbytes_of(one.ty) for one in (binding.var, *binding.value.args))


def _nbytes_of(type_: Any) -> int:
    if isinstance(type_, relax.TupleType):
        return sum(map(_nbytes_of, type_.fields))
    if not isinstance(type_, relax.TensorType) or type_.shape is None:
        return 0
    count = 1
    for extent in shape_of(relax.Var("x", type_)):
        count *= extent
    return count * ((tvm.DataType(str(type_.dtype)).bits + 7) // 8)


def _machine() -> str:
    versions = f"amp_ir {VERSION}, torch {torch.__version__}, Python {platform.python_version()}"
    return f"{versions}, {platform.system()} {host_description()}"
