# SPDX-License-Identifier: Apache-2.0
"""Workspace sizes of library calls, which the planner asks the library for."""

from __future__ import annotations

import math
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from amp_ir.host import native
from amp_ir.host.memory_limit import memory_for
from amp_ir.ir.dataflow import op_name
from amp_ir.ir.loop_call import SYMBOL as LOOP
from amp_ir.ir.loop_call import is_loop_call, loop_persistent_nbytes, loop_workspace_nbytes
from amp_ir.ir.tensor_layout import dtype_nbytes

# Libraries that report a call's workspace, and take it from the caller.
_CALLER_PROVIDED = ("onednn", "torch", "cublaslt")


def with_workspace(symbol: str) -> str:
    """Return the function that gives calls of `symbol` a workspace: (symbol, workspace, ...).

    A loop's takes it itself.
    """
    if symbol == LOOP:
        return symbol
    return f"{symbol.rpartition('.')[0]}.with_scratch"


def workspace_nbytes(call: relax.Call) -> int:
    """Return the bytes of caller-provided workspace of the call; 0 where it takes none.

    oneDNN computes the size for these shapes, dtypes and this number of threads, as the first run
    would otherwise do. For cuBLASLt the shapes alone decide how much it may use, since a step is
    planned where there is no GPU. Calls of PyTorch on a CPU take it for their float32 copies of
    low operands and results. What PyTorch allocates inside of its convolutions and attention,
    and all that it does on a GPU, cannot be asked for: it is not in the plan.

    Args:
        call: a call_dps_packed whose tensors are flat or dense; their contents are not needed.
    """
    if is_loop_call(call):
        return loop_workspace_nbytes(call)
    name = str(call.args[0].global_symbol)
    library = name.rpartition(".")[0]
    query = f"{library}.scratch_nbytes"
    if library.rpartition(".")[2] not in _CALLER_PROVIDED or not native.has(query):
        return 0
    return int(native.function(query)(name, *_examples(call)))


def persistent_nbytes(call: relax.Call) -> int:
    """Return the bytes that the call keeps allocated as persistent workspace for the process.

    oneDNN's gemm and PyTorch's matmuls do so for copies of their operands' pieces; of those of low
    operands, which PyTorch gives back, it is an upper bound. All calls share the largest one's.
    """
    if is_loop_call(call):
        return loop_persistent_nbytes(call)
    name = str(call.args[0].global_symbol)
    query = f"{name.rpartition('.')[0]}.kept_nbytes"
    if not native.has(query):
        return 0
    return int(native.function(query)(name, *_examples(call)))


def _examples(call: relax.Call) -> list[Any]:
    """Return the call's arguments, and then its results."""
    type_ = call.ty_args[0]
    results = type_.fields if isinstance(type_, relax.TupleType) else [type_]
    arguments = [_example(argument) for argument in call.args[1].fields]
    return [*arguments, *(_empty(result) for result in results)]


def _example(argument: relax.Expr) -> Any:
    """Return the argument as a function takes it; tensors without contents."""
    if isinstance(argument.ty, relax.TensorType):
        return _empty(argument.ty)
    if isinstance(argument, relax.ShapeExpr):
        return tvm_ffi.Shape(tuple(int(n) for n in argument.values))
    if isinstance(argument, tvm.ir.StringImm):
        return argument.value
    if isinstance(argument, tvm.tirx.IntImm):
        return int(argument)
    if isinstance(argument, tvm.tirx.FloatImm):
        return float(argument)
    assert op_name(argument) == "relax.null_value", f"a call's argument is {argument}"
    return None


def _empty(type_: relax.TensorType) -> tvm.runtime.Tensor:
    # Flat, as in a planned step. The pages are never touched: this costs addresses, no memory.
    size, dtype = max(math.prod(int(extent) for extent in type_.shape), 1), str(type_.dtype)
    with memory_for("a tensor of the step needs", size * dtype_nbytes(dtype)):
        return tvm.runtime.empty((size,), dtype)
