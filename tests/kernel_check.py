# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels of a small module and run them, to compare with the interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import tvm
from tvm import relax

import amp_ir.loops  # noqa: F401  (registers the lowerings)
from amp_ir.build import KERNEL_PIPELINE
from amp_ir.dialect import call_op
from amp_ir.dialect.define import dtype_name
from amp_ir.loops.fuse import fuse_loops
from amp_ir.target import cpu

_STORED_AS = {torch.bfloat16: torch.int16, torch.bool: torch.uint8}


def module_of(name: str, inputs: Sequence[torch.Tensor], **options: Any) -> tvm.IRModule:
    """A module whose `main` calls the one op `name` and returns its results."""
    builder = relax.BlockBuilder()
    params = [
        relax.Var(f"x{k}", relax.TensorType(list(one.shape), dtype_name(one)))
        for k, one in enumerate(inputs)
    ]
    with builder.function("main", params):
        with builder.dataflow():
            value = builder.emit(call_op(name, params, **options))
            if isinstance(value.ty, relax.TupleType):
                fields = [
                    builder.emit(relax.TupleGetItem(value, k)) for k in range(len(value.ty.fields))
                ]
                value = relax.Tuple(fields)
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    return builder.get()


def run_kernels(mod: tvm.IRModule, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Lower all of `main` to kernels, compile them for this machine and run them in order."""
    fused = fuse_loops(mod)
    functions = {
        variable: function
        for variable, function in fused.functions.items()
        if not isinstance(function, relax.Function)
    }
    compiled = tvm.compile(
        tvm.IRModule(functions), target=cpu().tvm_target, tir_pipeline=KERNEL_PIPELINE
    )
    main = fused["main"]
    values: dict[Any, Any] = dict(zip(main.params, inputs, strict=True))
    for binding in main.body.blocks[0].bindings:
        values[binding.var] = _evaluate(binding.value, values, compiled)
    result = values[main.body.body]
    return list(result) if isinstance(result, tuple) else [result]


def _evaluate(expr: Any, values: dict[Any, Any], compiled: Any) -> Any:
    if isinstance(expr, relax.Var):
        return values[expr]
    if isinstance(expr, relax.Tuple):
        return tuple(_evaluate(field, values, compiled) for field in expr.fields)
    if isinstance(expr, relax.TupleGetItem):
        return values[expr.tuple_value][int(expr.index)]
    if expr.op.name == "relax.reshape":
        return values[expr.args[0]].reshape([int(n) for n in expr.args[1].values])
    assert expr.op.name == "relax.call_tir", expr
    arguments = [_evaluate(field, values, compiled) for field in expr.args[1].fields]
    (type_,) = expr.ty_args
    types = type_.fields if isinstance(type_, relax.TupleType) else [type_]
    outputs = [
        torch.zeros([int(n) for n in one.shape], dtype=getattr(torch, str(one.dtype)))
        for one in types
    ]
    compiled[expr.args[0].name_hint](*(_flat(one) for one in [*arguments, *outputs]))
    return tuple(outputs) if isinstance(type_, relax.TupleType) else outputs[0]


def _flat(tensor: torch.Tensor) -> Any:
    """A tensor's memory as the kernel declares it: flat, bfloat16 as uint16, bool as uint8."""
    flat = tensor.contiguous().reshape(-1)
    flat = flat.view(_STORED_AS.get(flat.dtype, flat.dtype))
    if tensor.dtype == torch.bfloat16:
        flat = flat.view(torch.uint16)
    return tvm.runtime.from_dlpack(flat)
