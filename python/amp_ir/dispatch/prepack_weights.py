# SPDX-License-Identifier: Apache-2.0
"""A matrix that many matmuls read is brought into the library's own layout once."""

from __future__ import annotations

import attrs
import tvm
import tvm_ffi
from tvm import relax

from amp_ir.host import native
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.dispatch_log import DispatchLog
from amp_ir.ir.library_call import library_call, shape_argument
from amp_ir.ir.strided_view import dense_strides

# From so many calls on the copy is worth its memory and a call. A call on a plain matrix makes a
# copy of its own, as dear as this one: of 16 x 2048 x 512, a step of an LSTM back in time, in
# bfloat16 with AMX it takes 0.10 ms, 0.02 to 0.06 on a packed matrix, and packing takes 0.11; in
# float32 0.24, 0.13 and 0.20. The forward pass's 16 x 512 x 2048, whose matrix is a transposed
# one: 0.08, 0.03 and 0.21; 0.22, 0.13 and 0.22. Beside 512 rows the copy matters little: weights
# that are read once or twice a step are left where they are.
_LEAST_CALLS = 8
_MOST_ROWS = 256

_MATMUL = "amp_ir.onednn.matmul"
_MATMUL_PACKED = "amp_ir.onednn.matmul_packed"
_PACK = "amp_ir.onednn.pack"
_PACKED_NBYTES = "amp_ir.onednn.packed_nbytes"


@attrs.frozen
class _Operand:
    """A matrix as a matmul reads it: which memory, with which dims and strides in elements."""

    base: relax.Var
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


def pack_operands(ir: tvm.IRModule, *, log: DispatchLog | None = None) -> tvm.IRModule:
    """Give oneDNN's matmuls a packed copy of a second operand that at least 8 of them share.

    Before:  y1 = onednn.matmul(x1, w); ...; y64 = onednn.matmul(x64, w)
    After:   p = onednn.pack(w); y1 = onednn.matmul_packed(x1, p); ...

    Requires: `dispatch` has run; every variable is bound once, so that the matrix is the same in
              all calls: where it is a parameter, memory planning keeps its update behind the pack.
    Ensures:  only matmuls of matrices with at most 256 rows are changed; the copy lives from its
              first to its last reader, takes what this machine's oneDNN asks for it and at least
              the bytes of a plain one, which it is on a CPU whose oneDNN wants another layout; of
              a low copy that only these matmuls read nothing else is left. `log` is told.
    """
    return _Packer(ir, DispatchLog() if log is None else log).run()


class _Packer:
    def __init__(self, ir: tvm.IRModule, log: DispatchLog) -> None:
        self.flow = Dataflow(ir)
        self.log = log

    def run(self) -> tvm.IRModule:
        if not native.has(_PACKED_NBYTES):
            return self.flow.ir
        calls: dict[_Operand, int] = {}
        for value in self.flow.values.values():
            operand = _shared_operand(value)
            if operand is not None:
                calls[operand] = calls.get(operand, 0) + 1
        nbytes = {one: _packed_nbytes(one) for one, n in calls.items() if n >= _LEAST_CALLS}
        nbytes = {one: n for one, n in nbytes.items() if n}
        if not nbytes:
            return self.flow.ir
        for one in nbytes:
            self.log.add("pack", "onednn", f"{calls[one]} matmuls read what is packed once")
        return self.flow.finish(self._rewritten(nbytes))

    def _rewritten(self, nbytes: dict[_Operand, int]) -> list[relax.Binding]:
        rewritten: list[relax.Binding] = []
        packed: dict[_Operand, relax.Var] = {}
        for binding in self.flow.bindings:
            operand = _shared_operand(binding.value)
            if operand is None or operand not in nbytes:
                rewritten.append(binding)
                continue
            if operand not in packed:
                pack = _pack(operand, nbytes[operand], binding.value.span)
                packed[operand] = relax.DataflowVar(f"{operand.base.name}_packed", pack.ty)
                rewritten.append(relax.VarBinding(packed[operand], pack))
            call = _matmul_packed(binding.value, packed[operand])
            rewritten.append(relax.VarBinding(binding.var, call))
        return rewritten


def _shared_operand(value: relax.Expr) -> _Operand | None:
    """The second operand of a matmul that may read it packed; None for other calls."""
    if not isinstance(value, relax.Call) or value.op.name != "relax.call_dps_packed":
        return None
    if str(value.args[0].global_symbol) != _MATMUL:
        return None
    a, b, _, a_dims, _, b_dims, b_strides, *_ = value.args[1].fields
    dims, strides = _numbers(b_dims), _numbers(b_strides)
    rows = _numbers(a_dims)
    if len(rows) != 2 or len(dims) != 2 or rows[0] > _MOST_ROWS or not isinstance(b, relax.Var):
        return None
    transposed = (1, dims[0])
    if a.ty.dtype != b.ty.dtype or strides not in (dense_strides(dims), transposed):
        return None
    return _Operand(b, dims, strides, str(b.ty.dtype))


def _packed_nbytes(operand: _Operand) -> int:
    query = native.function(_PACKED_NBYTES)
    return int(query(tvm_ffi.Shape(operand.dims), operand.dtype))


def _pack(operand: _Operand, nbytes: int, span: tvm.ir.Span | None) -> relax.Call:
    arguments = [operand.base, shape_argument(operand.dims), shape_argument(operand.strides)]
    return library_call(_PACK, arguments, relax.TensorType([nbytes], "uint8"), span)


def _matmul_packed(call: relax.Call, packed: relax.Var) -> relax.Call:
    a, _, bias, a_dims, a_strides, b_dims, _, out_dims, out_strides, finish = call.args[1].fields
    arguments = [a, packed, bias, a_dims, a_strides, b_dims, out_dims, out_strides, finish]
    return library_call(_MATMUL_PACKED, arguments, call.ty_args[0], call.span)


def _numbers(shape: relax.ShapeExpr) -> tuple[int, ...]:
    return tuple(int(extent) for extent in shape.values)
