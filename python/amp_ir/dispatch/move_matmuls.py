# SPDX-License-Identifier: Apache-2.0
"""Move the matmuls that PyTorch multiplies faster than oneDNN 3.2 to PyTorch."""

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

# Extents from which PyTorch 2.13 is faster than oneDNN 3.2 on a Sapphire Rapids with AMX: of 850
# shapes with 128 to 8192 rows, 128 to 50257 columns and 128 to 16384 terms, measured side by side.
# PyTorch multiplies float32 by MKL and bfloat16 by its own, later oneDNN.
#
# The elements of the result: in float32 PyTorch takes 0.81 to 1.02 of the time from here on.
_ELEMENTS, _FLOAT32_COLUMNS = 3 * 2**18, 768
# Added to a matrix it takes 0.87 to 0.95 of the time with as many elements as this.
_SUMMED_ELEMENTS = 2**19
# In bfloat16 it takes 0.54 to 0.97 of the time where each of one or two threads has so many
# elements or rows, or where sums are so long; below, from half of the time to twice as much.
_ROWS, _COLUMNS, _TERMS = 768, 384, 384
_LONG_SUM, _LONG_SUM_COLUMNS = 2048, 1024
_MEASURED_THREADS = 2
_LEAST_ROWS = 256
# A transposed matrix with more columns, the weight of logits, gains nothing.
_MOST_TRANSPOSED_COLUMNS = 16384


def move_matmuls(
    ir: tvm.IRModule, libraries: Sequence[str], *, log: DispatchLog | None = None
) -> tvm.IRModule:
    """Let PyTorch multiply large matrices on a CPU with AMX.

    Before:  g = onednn.matmul(d, w)        # bf16[1576, 3072] by bf16[3072, 768]
    After:   g = torch.matmul(d, w)

    Before:  p1 = onednn.matmul_accumulate(d, x, p, alpha=-lr)        # float32
    After:   p1 = torch.matmul_accumulate(d, x, p, alpha=-lr)

    Args:
        ir: the step.
        libraries: the prefixes that `dispatch` had; nothing changes without both of these.
        log: records each call that moves.

    Requires: `dispatch`, `prepack_weights` and `accumulate_matmuls` have run: calls that they
              write for oneDNN remain.
    Ensures:  only matmuls of two matrices in one dtype, float32 or bfloat16, to that dtype,
              without a bias or an activation, are changed; of those that are added to a matrix the
              float32 ones. Their operands and results have the layouts that were measured. The sums
              are float32's, in another order.
    """
    if not {"onednn", "torch"} <= set(libraries) or not _can_move():
        return ir
    log = DispatchLog() if log is None else log
    flow = Dataflow(ir)
    bindings, threads = [], torch.get_num_threads()
    for binding in flow.bindings:
        call = read(binding.value)
        if isinstance(call, LibraryMatmul) and call.library == "onednn" and _gains(call, threads):
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


def _gains(call: LibraryMatmul, threads: int) -> bool:
    """Return whether PyTorch multiplies these matrices faster."""
    dtypes = {str(one.ty.dtype) for one in (call.a.base, call.b.base)} | {str(call.type_.dtype)}
    is_plain = call.bias is None and call.epilogue == "none" and not call.is_packed
    is_of_matrices = all(len(one.shape) == 2 for one in (call.a, call.b, call.out))
    if not is_plain or not is_of_matrices or call.out.shape[0] < _LEAST_ROWS:
        return False
    if call.out.strides != dense_strides(call.out.shape):
        return False
    if dtypes == {"float32"}:
        return _gains_in_float32(call)
    return dtypes == {"bfloat16"} and call.c is None and _gains_in_bfloat16(call, threads)


def _gains_in_float32(call: LibraryMatmul) -> bool:
    (rows, columns), is_measured = call.out.shape, _has_rows(call.b)
    is_measured &= _has_rows(call.a) or _has_columns(call.a)
    if call.c is not None:
        return is_measured and rows * columns >= _SUMMED_ELEMENTS
    return is_measured and columns >= _FLOAT32_COLUMNS and rows * columns >= _ELEMENTS


def _gains_in_bfloat16(call: LibraryMatmul, threads: int) -> bool:
    (rows, columns), terms = call.out.shape, call.a.shape[1]
    is_measured = _has_rows(call.a) and (
        _has_rows(call.b) or (_has_columns(call.b) and columns <= _MOST_TRANSPOSED_COLUMNS)
    )
    if not is_measured or columns < _COLUMNS or terms < _TERMS:
        return False
    is_large = rows * columns >= _ELEMENTS * threads or rows >= _ROWS * threads
    return is_large or (
        threads <= _MEASURED_THREADS and columns >= _LONG_SUM_COLUMNS and terms >= _LONG_SUM
    )


def _has_rows(one: StridedView) -> bool:
    """Return whether the matrix has its rows one after the other."""
    return one.strides == dense_strides(one.shape)


def _has_columns(one: StridedView) -> bool:
    """Return whether the matrix has its columns one after the other."""
    return one.strides == (1, one.shape[0])
