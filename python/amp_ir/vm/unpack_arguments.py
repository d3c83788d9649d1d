# SPDX-License-Identifier: Apache-2.0
"""Give kernels of a CPU the signature by which TVM's virtual machine calls functions."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.ir import PointerType, PrimType

# From tvm/tirx/builtin.h, TVMStructFieldKind: fields that `tvm_struct_get` reads.
_DATA, _VALUE = 1, 15
# From tvm/ffi/c_api.h: the DLTensor of a tensor's object follows the header of the object.
_HEADER_NBYTES = 24
# From tvm/ir/function.h, CallingConv::kCPackedFunc, and DLPack's kDLCPU.
_PACKED, _CPU = 1, 1
_POINTER = PointerType(PrimType("void"))


def unpack_arguments(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """Read a kernel's parameters from the array of arguments of a packed function.

    Before:  kernel(x: Buffer, n: int32): y[...] = x[...]
    After:   __tvm_ffi_kernel(self, args, num_args, result) -> int32:
                 x = decl_buffer(data=args[0].object[24:].data); n = int32(args[1]); ...; return 0

    TVM's MakePackedAPI serves callers of every kind: it asks each argument for its type and each
    tensor for its shape, strides, alignment and device. For the 33 kernels of one layer of BERT
    that is a fifth of the lines that LLVM reads, and a sixth of its time.

    Requires: a caller that passes tensors as objects, not as `DLTensor*`: dense, aligned, on this
              CPU, of the dtype and size that the kernel was made for. The virtual machine does,
              after `Program` has checked state and batch; all else is planned here. The kernel
              returns nothing.
    Ensures:  the body is as it was.
    """
    names = {"self_handle": _POINTER, "args": _POINTER, "num_args": "int32", "result": _POINTER}
    packed = {name: tirx.Var(name, kind) for name, kind in names.items()}
    unpacked = [_unpacked(one, packed["args"], at) for at, one in enumerate(kernel.params)]
    name, own = str(kernel.attrs["global_symbol"]), kernel.body
    # A function of its own, to which code generation passes the promise. Or only a scope: what the
    # body allocates is freed at the end of that, and else after the return, where nothing is.
    key = "compute_scope" if kernel.attrs.get("tirx.noalias", False) else "amp_ir.body"
    scope = tvm.ir.StringImm(f"{name}_compute_")
    own = tirx.AttrStmt(tirx.const(0, "int32"), key, scope, own)
    body = tirx.SeqStmt([*unpacked, own, tirx.Return(tirx.const(0, "int32"))])
    # Where memory that does not fit on the stack is taken.
    for key, number in {"device_type": _CPU, "device_id": 0}.items():
        body = tirx.AttrStmt(tvm.ir.StringImm("default"), key, tirx.const(number, "int32"), body)
    made = tirx.PrimFunc([*packed.values()], body, PrimType("int32"), kernel.attrs)
    return made.with_attr({"global_symbol": f"__tvm_ffi_{name}", "calling_conv": _PACKED})


def _unpacked(parameter: tirx.Var, arguments: tirx.Var, at: int) -> Any:
    """Return the statement that gives a parameter its value."""
    if not isinstance(parameter.ty, tirx.BufferType):
        if isinstance(parameter.ty, PointerType):
            return tirx.Bind(parameter, _field(arguments, at, _VALUE, parameter.ty))
        value = _field(arguments, at, _VALUE, "int64")
        return tirx.Bind(parameter, value.astype(str(parameter.ty)))
    tensor = tirx.call_intrin(
        _POINTER, "tirx.handle_add_byte_offset", _field(arguments, at, _VALUE, _POINTER),
        _HEADER_NBYTES,
    )  # fmt: skip
    data = _field(tensor, 0, _DATA, PointerType(PrimType(str(parameter.ty.dtype)), "global"))
    return tirx.DeclBuffer(parameter, data=data)


def _field(record: Any, at: int, field: int, kind: Any) -> Any:
    return tirx.call_intrin(kind, "tirx.tvm_struct_get", record, at, field)
