# SPDX-License-Identifier: Apache-2.0
"""Prepack a matrix that many matmuls read: copy it once into the library's own layout."""

from __future__ import annotations

from collections.abc import Container

import attrs
import tvm
import tvm_ffi
from tvm import relax

from amp_ir.host import native
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.dispatch_log import DispatchLog
from amp_ir.ir.library_call import LibraryMatmul, LibraryPack, read, write
from amp_ir.ir.strided_view import StridedView, dense_strides

# From so many calls on the copy is worth its memory and a call. A call on a plain matrix makes its
# own copy, at the same cost: of 16 x 2048 x 512, a step of an LSTM back in time, in
# bfloat16 with AMX it takes 0.10 ms, 0.02 to 0.06 on a packed matrix, and packing takes 0.11; in
# float32 0.24, 0.13 and 0.20. The forward pass's 16 x 512 x 2048, whose matrix is a transposed
# one: 0.08, 0.03 and 0.21; 0.22, 0.13 and 0.22. Beside 512 rows the copy matters little: weights
# that are read once or twice a step are left unpacked.
_LEAST_CALLS = 8
_MOST_ROWS = 256

_MATMUL = "amp_ir.onednn.matmul"
_PACKED_NBYTES = "amp_ir.onednn.packed_nbytes"


@attrs.frozen
class _Operand:
    """A matrix as a matmul reads it: which memory, with which dims and strides in elements."""

    matrix: StridedView
    dtype: str


def prepack_weights(
    ir: tvm.IRModule,
    *,
    log: DispatchLog | None = None,
    least_calls: int | None = None,
    among: Container[relax.Expr] | None = None,
) -> tvm.IRModule:
    """Prepack for oneDNN the second operand that at least 8 matmuls, or `least_calls`, share.

    Before:  y1 = onednn.matmul(x1, w); ...; y64 = onednn.matmul(x64, w)
    After:   p = onednn.pack(w); y1 = onednn.matmul_packed(x1, p); ...

    Requires: `dispatch` has run; every variable is bound once, so that the matrix is the same in
              all calls: where it is a parameter, memory planning keeps its update after the pack.
    Ensures:  only matmuls of matrices with at most 256 rows are changed; the copy lives from its
              first to its last reader, takes what this machine's oneDNN asks for it and at least
              the bytes of a plain one, which it is on a CPU whose oneDNN wants another layout; of
              a low copy that only these matmuls read nothing else is left. The pass records each
              in `log`. With `among`, only matrices in the memory of these are packed.
    """
    least = _LEAST_CALLS if least_calls is None else least_calls
    return _Packer(ir, DispatchLog() if log is None else log, least, among).run()


class _Packer:
    def __init__(
        self,
        ir: tvm.IRModule,
        log: DispatchLog,
        least_calls: int,
        among: Container[relax.Expr] | None,
    ) -> None:
        self.flow = Dataflow(ir)
        self.log = log
        self.least_calls = least_calls
        self.among = among

    def run(self) -> tvm.IRModule:
        if not native.has(_PACKED_NBYTES):
            return self.flow.ir
        calls: dict[_Operand, int] = {}
        for value in self.flow.values.values():
            operand = _shared_operand(value)
            if operand is not None and (self.among is None or operand.matrix.base in self.among):
                calls[operand] = calls.get(operand, 0) + 1
        nbytes = {one: _packed_nbytes(one) for one, n in calls.items() if n >= self.least_calls}
        nbytes = {one: n for one, n in nbytes.items() if n}
        if not nbytes:
            return self.flow.ir
        for one in nbytes:
            self.log.add("pack", "onednn", f"{calls[one]} matmuls read one prepacked matrix")
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
                packed[operand] = relax.DataflowVar(f"{operand.matrix.base.name}_packed", pack.ty)
                rewritten.append(relax.VarBinding(packed[operand], pack))
            call = _matmul_packed(binding.value, packed[operand])
            rewritten.append(relax.VarBinding(binding.var, call))
        return rewritten


def _shared_operand(value: relax.Expr) -> _Operand | None:
    """Return the second operand of a matmul that may read it packed; None for other calls."""
    call = read(value)
    if not isinstance(call, LibraryMatmul) or call.symbol != _MATMUL:
        return None
    a, b, dims = call.a, call.b, call.b.shape
    if len(a.shape) != 2 or len(dims) != 2 or a.shape[0] > _MOST_ROWS:
        return None
    transposed = (1, dims[0])
    if a.base.ty.dtype != b.base.ty.dtype or b.strides not in (dense_strides(dims), transposed):
        return None
    return _Operand(b, str(b.base.ty.dtype)) if isinstance(b.base, relax.Var) else None


def _packed_nbytes(operand: _Operand) -> int:
    query = native.function(_PACKED_NBYTES)
    return int(query(tvm_ffi.Shape(operand.matrix.shape), operand.dtype))


def _pack(operand: _Operand, nbytes: int, span: tvm.ir.Span | None) -> relax.Call:
    type_ = relax.TensorType([nbytes], "uint8")
    return write(LibraryPack(library="onednn", type_=type_, span=span, b=operand.matrix))


def _matmul_packed(value: relax.Call, packed: relax.Var) -> relax.Call:
    call = read(value)
    assert isinstance(call, LibraryMatmul), "a shared operand is that of a matmul"
    return write(attrs.evolve(call, b=attrs.evolve(call.b, base=packed), is_packed=True))
