# SPDX-License-Identifier: Apache-2.0
"""Workspace sizes of library calls, which the planner asks the library for."""

from __future__ import annotations

import math
from typing import Any

import attrs
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


@attrs.frozen
class CallMemory:
    """Bytes that a call needs beside its arguments and results.

    `workspace_nbytes`: memory that the caller provides; 0 where it takes none. `persistent_nbytes`:
    what the call keeps allocated for the process; all calls share the largest one's.
    """

    workspace_nbytes: int
    persistent_nbytes: int


class CallMemories:
    """The memory of library calls, asked once for calls that are the same but for their operands.

    For one plan: what a library needs depends on the number of threads, too.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], CallMemory] = {}

    def of(self, call: relax.Call) -> CallMemory:
        """Return the memory of a call.

        oneDNN computes the workspace for these shapes, dtypes and this number of threads, as the
        first run would otherwise do. For cuBLASLt the shapes alone decide how much it may use,
        since a step is planned where there is no GPU. Calls of PyTorch on a CPU take it for their
        float32 copies of low operands and results. What PyTorch allocates inside of its
        convolutions and attention, and all that it does on a GPU, cannot be asked for: it is not in
        the plan.

        oneDNN's gemm and PyTorch's matmuls keep memory for copies of their operands' pieces; of
        those of low operands, which PyTorch gives back, it is an upper bound.

        Args:
            call: a call_dps_packed whose tensors are flat or dense; their contents are not needed.
        """
        if is_loop_call(call):
            return CallMemory(loop_workspace_nbytes(call), loop_persistent_nbytes(call))
        name = str(call.args[0].global_symbol)
        library = name.rpartition(".")[0]
        takes = library.rpartition(".")[2] in _CALLER_PROVIDED
        queries = [f"{library}.scratch_nbytes" if takes else "", f"{library}.kept_nbytes"]
        queries = [one if one and native.has(one) else "" for one in queries]
        if not any(queries):
            return CallMemory(0, 0)
        described = [_described(one) for one in _operands(call)]
        key = (name, *described)
        found = self._known.get(key)
        if found is None:
            examples = [_example(one) for one in described]
            sizes = [int(native.function(q)(name, *examples)) if q else 0 for q in queries]
            found = self._known[key] = CallMemory(*sizes)
        return found


@attrs.frozen
class _Tensor:
    size: int
    dtype: str


def _operands(call: relax.Call) -> list[Any]:
    """Return the call's arguments, and then the types of its results."""
    type_ = call.ty_args[0]
    results = type_.fields if isinstance(type_, relax.TupleType) else [type_]
    return [*call.args[1].fields, *results]


def _described(one: Any) -> Any:
    """Return an argument or the type of a result as a value that can be compared."""
    type_ = one if isinstance(one, relax.TensorType) else one.ty
    if isinstance(type_, relax.TensorType):
        # Flat, as in a planned step.
        size = math.prod(int(extent) for extent in type_.shape)
        return _Tensor(max(size, 1), str(type_.dtype))
    if isinstance(one, relax.ShapeExpr):
        return tuple(int(n) for n in one.values)
    if isinstance(one, tvm.ir.StringImm):
        return one.value
    if isinstance(one, tvm.tirx.IntImm):
        return int(one)
    if isinstance(one, tvm.tirx.FloatImm):
        return float(one)
    assert op_name(one) == "relax.null_value", f"a call's argument is {one}"
    return None


def _example(described: Any) -> Any:
    """Return what a function takes for it; tensors without contents."""
    if isinstance(described, tuple):
        return tvm_ffi.Shape(described)
    if not isinstance(described, _Tensor):
        return described
    # The pages are never touched: this costs addresses, no memory.
    nbytes = described.size * dtype_nbytes(described.dtype)
    with memory_for("a tensor of the step needs", nbytes):
        return tvm.runtime.empty((described.size,), described.dtype)
