# SPDX-License-Identifier: Apache-2.0
"""Kernels that read their parameters from the arguments of a packed function."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import tirx

from amp_ir.ir.target import cpu
from amp_ir.vm.build import KERNEL_PIPELINE
from amp_ir.vm.unpack_arguments import unpack_arguments

GOLDEN = """\
def __tvm_ffi_scaled(self_handle: T.handle, args: T.handle, num_args: T.int32, \
result: T.handle) -> T.int32:
    T.func_attr({"calling_conv": 1, "tirx.noalias": %s})
    T.attr("default", "device_id", 0)
    T.attr("default", "device_type", 1)
    x = T.decl_buffer((2147483647,), data=T.tvm_struct_get(T.handle_add_byte_offset(\
T.tvm_struct_get(args, 0, 15, T.handle().ty), 24), 0, 1, T.handle("float32", "global").ty))
    y = T.decl_buffer((2147483647,), "float64", data=T.tvm_struct_get(T.handle_add_byte_offset(\
T.tvm_struct_get(args, 1, 15, T.handle().ty), 24), 0, 1, T.handle("float64", "global").ty))
    n: T.let[T.int32] = T.Cast("int32", T.tvm_struct_get(args, 2, 15, "int64"))
    factor: T.let[T.int64] = T.tvm_struct_get(args, 3, 15, "int64")
"""
LOOP = """\
for row in range(n):
    y[row] = T.Cast("float64", x[row]) * T.Cast("float64", factor)
"""


def scaled(noalias: bool) -> tirx.PrimFunc:
    """A kernel y[row] = x[row] * factor over n rows."""
    x = tirx.decl_buffer((2**31 - 1,), "float32", "x")
    y = tirx.decl_buffer((2**31 - 1,), "float64", "y")
    n, factor, row = tirx.Var("n", "int32"), tirx.Var("factor", "int64"), tirx.Var("row", "int32")
    product = tirx.Cast("float64", tirx.BufferLoad(x, [row])) * tirx.Cast("float64", factor)
    body = tirx.For(row, 0, n, tirx.ForKind.SERIAL, tirx.BufferStore(y, product, [row]))
    kernel = tirx.PrimFunc([x, y, n, factor], body)
    return kernel.with_attr({"global_symbol": "scaled", "tirx.noalias": noalias})


def indented(text: str, by: int) -> str:
    return "".join(" " * by + line for line in text.splitlines(keepends=True))


@pytest.mark.parametrize("noalias", [False, True])
def test_parameters_are_read_from_the_arguments(noalias: bool):
    golden = GOLDEN % noalias
    # The promise is of the arguments of a function of its own, or LLVM would not know.
    key = "compute_scope" if noalias else "amp_ir.body"
    golden += f'    with T.attr(0, "{key}", "scaled_compute_"):\n' + indented(LOOP, 8)
    text = str(unpack_arguments(scaled(noalias)))
    assert text.partition("@T.prim_func\n")[2].strip() == (golden + "    return 0").strip()


@pytest.mark.parametrize("noalias", [False, True])
def test_values_arrive(noalias: bool):
    """Also where an extent is the largest, and a number does not fit into 32 bits."""
    with cpu().tvm_target as target:
        ir = tvm.IRModule({"scaled": scaled(noalias)})
        library = tvm.tirx.build(ir, target=target, pipeline=KERNEL_PIPELINE)
    x = np.arange(5, dtype="float32")
    for n, factor in [(5, 3), (4, -(2**40)), (0, 1)]:
        y = tvm.runtime.tensor(np.full(5, -1.0))
        library["scaled"](tvm.runtime.tensor(x), y, n, factor)
        wanted = np.where(np.arange(5) < n, x.astype("float64") * factor, -1.0)
        np.testing.assert_array_equal(y.numpy(), wanted)


@pytest.mark.parametrize("noalias", [False, True])
def test_what_a_kernel_allocates_is_freed_before_it_returns(noalias: bool):
    y = tirx.decl_buffer((1,), "float32", "y")
    own = tirx.decl_buffer((1 << 16,), "float32", "own")
    at = tirx.Var("at", "int32")
    fill = tirx.BufferStore(own, tirx.Cast("float32", at), [at])
    steps = [
        tirx.AllocBuffer(own),
        tirx.For(at, 0, 1 << 16, tirx.ForKind.SERIAL, fill),
        tirx.BufferStore(y, tirx.BufferLoad(own, [1234]), [0]),
    ]
    kernel = tirx.PrimFunc([y], tirx.SeqStmt(steps))
    kernel = kernel.with_attr({"global_symbol": "last", "tirx.noalias": noalias})
    lower = [tirx.transform.BindTarget(cpu().tvm_target), tirx.transform.LowerTVMBuiltin()]
    unpacked = tvm.IRModule({"last": unpack_arguments(kernel)})
    text = str(tvm.transform.Sequential(lower)(unpacked))
    taken, freed = text.index("TVMBackendAllocWorkspace"), text.index("TVMBackendFreeWorkspace")
    assert taken < freed < text.index("return 0")
