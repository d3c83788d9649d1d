# SPDX-License-Identifier: Apache-2.0
"""Move the float32 matmuls that PyTorch multiplies faster than oneDNN 3.2 to PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
import tvm
from tvm import relax

from amp_ir.host import native
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.dispatch_log import DispatchLog
from amp_ir.ir.library_call import LibraryMatmul, read, write
from amp_ir.ir.strided_view import StridedView, dense_strides

ONEDNN, PYTORCH = "amp_ir.onednn.matmul", "amp_ir.torch.matmul"
ACCUMULATE = f"{PYTORCH}_accumulate"
REASON = "PyTorch multiplies matrices of this size faster"

# Elements of the result from which PyTorch 2.13, by MKL, takes 0.81 to 1.02 of the time of oneDNN
# 3.2 on a Sapphire Rapids with AMX, of shapes with 128 to 8192 rows, 128 to 50257 columns and 128
# to 16384 terms, measured side by side.
_ELEMENTS, _COLUMNS = 3 * 2**18, 768
# Added to a matrix it takes 0.87 to 0.95 of the time with as many elements as this.
_SUMMED_ELEMENTS = 2**19
_LEAST_ROWS = 256


def move_matmuls(
    ir: tvm.IRModule, libraries: Sequence[str], *, log: DispatchLog | None = None
) -> tvm.IRModule:
    """Let PyTorch multiply large matrices of float32 on a CPU with AMX.

    Before:  g = onednn.matmul(d, w)        # f32[1576, 3072] by f32[3072, 768]
    After:   g = torch.matmul(d, w)

    Before:  p1 = onednn.matmul_accumulate(d, x, p, alpha=-lr)
    After:   p1 = torch.matmul_accumulate(d, x, p, alpha=-lr)

    Args:
        ir: the step.
        libraries: the prefixes that `dispatch` had; nothing changes without both of these.
        log: records each call that moves.

    Requires: `dispatch`, `prepack_weights` and `accumulate_matmuls` have run: calls that they
              write for oneDNN remain.
    Ensures:  only matmuls of two matrices of float32 to float32, without a bias or an activation,
              are changed. Their operands and results have the layouts that were measured. The sums
              are added up in another order.
    """
    if not {"onednn", "torch"} <= set(libraries) or not _can_move():
        return ir
    log = DispatchLog() if log is None else log
    flow = Dataflow(ir)
    bindings = []
    for binding in flow.bindings:
        call = read(binding.value)
        if isinstance(call, LibraryMatmul) and call.library == "onednn" and _gains(call):
            log.move("relax.matmul", "onednn", "torch", REASON)
            moved = write(attrs.evolve(call, library="torch"))
            bindings.append(relax.VarBinding(binding.var, moved))
        else:
            bindings.append(binding)
    return flow.finish(bindings)


def _can_move() -> bool:
    has_both = all(map(native.has, (ONEDNN, PYTORCH, ACCUMULATE)))
    # Without MKL PyTorch has another library for float32, which was not measured.
    return has_both and native.has_amx() and torch.backends.mkl.is_available()


def _gains(call: LibraryMatmul) -> bool:
    """Return whether PyTorch multiplies these matrices faster."""
    dtypes = {str(one.ty.dtype) for one in (call.a.base, call.b.base)} | {str(call.type_.dtype)}
    is_plain = call.bias is None and call.epilogue == "none" and not call.is_packed
    is_of_matrices = all(len(one.shape) == 2 for one in (call.a, call.b, call.out))
    if not is_plain or not is_of_matrices or call.out.shape[0] < _LEAST_ROWS:
        return False
    if dtypes != {"float32"} or call.out.strides != dense_strides(call.out.shape):
        return False
    (rows, columns), is_measured = call.out.shape, _has_rows(call.b)
    is_measured &= _has_rows(call.a) or _has_columns(call.a)
    if call.c is not None:
        return is_measured and rows * columns >= _SUMMED_ELEMENTS
    return is_measured and columns >= _COLUMNS and rows * columns >= _ELEMENTS


def _has_rows(one: StridedView) -> bool:
    """Return whether the matrix has its rows one after the other."""
    return one.strides == dense_strides(one.shape)


def _has_columns(one: StridedView) -> bool:
    """Return whether the matrix has its columns one after the other."""
    return one.strides == (1, one.shape[0])
