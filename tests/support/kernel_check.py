# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels of a small module and run them, to compare with the interpreter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import tvm
from tvm import relax
from tvm.ir.expr import GenericConst

import amp_ir.loops  # noqa: F401  (registers the lowerings)
from amp_ir.dialect import call_op
from amp_ir.dialect.define import dtype_name
from amp_ir.ir.target import cpu
from amp_ir.loops.cuda import emit_cuda
from amp_ir.loops.fusion import cuda_launches
from amp_ir.loops.fusion.fuse import fuse_loops
from amp_ir.loops.fusion.horizontal import fuse_horizontally
from amp_ir.loops.fusion.share_kernels import share_kernels
from amp_ir.vm.build import CUDA_PIPELINE, KERNEL_PIPELINE

_STORED_AS = {torch.bfloat16: torch.uint16, torch.bool: torch.uint8}


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


# Takes a kernel's name and its arguments: flat tensors, and the numbers of shared kernels.
Run = Callable[[str, list[Any]], None]


def run_kernels(mod: tvm.IRModule, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Lower all of `main` to kernels, compile them for this machine and run them in order."""
    fused = fuse_loops(mod)
    compiled = tvm.compile(kernels_of(fused), cpu().tvm_target, tir_pipeline=KERNEL_PIPELINE)

    def run(name: str, arguments: list[torch.Tensor]) -> None:
        compiled[name](*(tvm.runtime.from_dlpack(one) for one in arguments))

    return evaluate(fused, inputs, run)


def run_cuda_kernels(mod: tvm.IRModule, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same with CUDA kernels, in the emulator; twice, with threads and blocks in either order.

    What a kernel writes must be the same bits both times.
    """
    (results,) = run_cuda_modules([(mod, inputs)])
    return results


def run_cuda_modules(
    cases: Sequence[tuple[tvm.IRModule, Sequence[torch.Tensor]]],
) -> list[list[torch.Tensor]]:
    """The same for several modules, each with its inputs; their kernels are compiled together."""
    from cuda_emulator import device

    fused = [
        share_kernels(
            fuse_horizontally(
                fuse_loops(mod, emitter=emit_cuda, arithmetic_is_free=True), cuda_launches
            )
        )
        for mod, _ in cases
    ]
    functions = {}
    for number, one in enumerate(fused):
        for variable, function in kernels_of(one).functions.items():
            name = f"case_{number}_{variable.name_hint}"
            functions[name] = function.with_attr("global_symbol", name)
    with device.target():
        compiled = tvm.compile(tvm.IRModule(functions), device.target(), tir_pipeline=CUDA_PIPELINE)

    def on_device(argument: Any) -> Any:
        return argument if isinstance(argument, int) else device.to_device(argument.numpy())

    def run(name: str, arguments: list[Any]) -> None:
        given, backwards = ([on_device(one) for one in arguments] for _ in range(2))
        compiled[name](*given)
        with device.reversed_order():
            compiled[name](*backwards)
        for argument, one, other in zip(arguments, given, backwards, strict=True):
            if isinstance(argument, int):
                continue
            array = argument.numpy()
            array[...] = one.numpy()
            assert array.tobytes() == other.numpy().tobytes(), f"{name} depends on the order"

    return [
        evaluate(one, inputs, functools.partial(_named, run, number))
        for number, (one, (_, inputs)) in enumerate(zip(fused, cases, strict=True))
    ]


def _named(run: Run, number: int, name: str, arguments: list[Any]) -> None:
    run(f"case_{number}_{name}", arguments)


def kernels_of(fused: tvm.IRModule) -> tvm.IRModule:
    """The kernels of a lowered module."""
    functions = fused.functions.items()
    return tvm.IRModule({v: f for v, f in functions if not isinstance(f, relax.Function)})


def evaluate(fused: tvm.IRModule, inputs: Sequence[torch.Tensor], run: Run) -> list[torch.Tensor]:
    """The results of `main`, whose kernels `run(name, arguments)` runs on flat tensors in place."""
    main = fused["main"]
    values: dict[Any, Any] = dict(zip(main.params, inputs, strict=True))
    for binding in main.body.blocks[0].bindings:
        values[binding.var] = _evaluate(binding.value, values, run)
    result = values[main.body.body]
    return list(result) if isinstance(result, tuple) else [result]


def _evaluate(expr: Any, values: dict[Any, Any], run: Run) -> Any:
    if isinstance(expr, relax.Var):
        return values[expr]
    if isinstance(expr, tvm.tirx.IntImm):
        return int(expr)
    if isinstance(expr, relax.Tuple):
        return tuple(_evaluate(field, values, run) for field in expr.fields)
    if isinstance(expr, GenericConst):
        return torch.from_numpy(expr.value.numpy()).clone()  # in memory aligned for kernels
    if isinstance(expr, relax.TupleGetItem):
        return values[expr.tuple_value][int(expr.index)]
    if expr.op.name == "relax.reshape":
        return values[expr.args[0]].reshape([int(n) for n in expr.args[1].values])
    assert expr.op.name == "relax.call_tir", expr
    arguments = [_evaluate(field, values, run) for field in expr.args[1].fields]
    (type_,) = expr.ty_args
    types = type_.fields if isinstance(type_, relax.TupleType) else [type_]
    outputs = [
        torch.zeros([int(n) for n in one.shape], dtype=getattr(torch, str(one.dtype)))
        for one in types
    ]
    flat = [_flat(one) for one in [*arguments, *outputs]]
    run(expr.args[0].name_hint, flat)
    return tuple(outputs) if isinstance(type_, relax.TupleType) else outputs[0]


def _flat(tensor: torch.Tensor | int) -> torch.Tensor | int:
    """A tensor's memory as the kernel declares it: flat, bfloat16 as uint16, bool as uint8."""
    if isinstance(tensor, int):
        return tensor
    flat = tensor.contiguous().reshape(-1)
    if flat.numel() == 0:
        flat = flat.new_empty(1)
    return flat.view(_STORED_AS.get(flat.dtype, flat.dtype))
