# SPDX-License-Identifier: Apache-2.0
"""The loops stage: what no library computes becomes few kernels for a CPU or a GPU."""

from __future__ import annotations

from types import ModuleType

import tvm

from amp_ir.loops.codegen.kernel import Emitter
from amp_ir.loops.cpu import emit_cpu
from amp_ir.loops.fusion import cpu_tasks
from amp_ir.loops.fusion.fuse import fuse_loops
from amp_ir.loops.fusion.horizontal import fuse_horizontally
from amp_ir.loops.fusion.merged_kernel import KernelMerger
from amp_ir.loops.fusion.share_kernels import share_kernels


def write_kernels(
    ir: tvm.IRModule, *, is_cuda: bool, is_strict: bool, disable_fusion: bool = False
) -> tvm.IRModule:
    """Fuse ops into kernels, fuse independent kernels horizontally, share equal ones.

    Before:  y = relax.add(x, b); z = relax.nn.relu(y)
    After:   z = call_tir(fused_add_relu, (x, b))

    Requires: calls of libraries are written.
    Ensures:  low precision exists only in memory, unless `is_strict`, which rounds every value.
              With `disable_fusion` an op that is not a view is a kernel of its own.
    """
    emitter = emitter_of(is_cuda=is_cuda)
    merge = _launches() if is_cuda else cpu_tasks
    ir = fuse_loops(
        ir,
        strict=is_strict,
        emitter=emitter,
        disable_fusion=disable_fusion,
        arithmetic_is_free=is_cuda,
    )
    return share_kernels(ir if disable_fusion else fuse_horizontally(ir, merge))


def emitter_of(*, is_cuda: bool) -> Emitter:
    """Return what writes the kernels of a device."""
    # On demand, as `_launches`: steps for a CPU would import a seventh of loops/ in vain.
    if is_cuda:
        from amp_ir.loops.cuda import emit_cuda

        return emit_cuda
    return emit_cpu


def merger_of(*, is_cuda: bool) -> KernelMerger | None:
    """Return what fuses kernels that read only the step's inputs; None on a CPU.

    A CPU's calls cost little, and casts are best read from its cache at once.
    """
    return KernelMerger(_launches()) if is_cuda else None


def _launches() -> ModuleType:
    from amp_ir.loops.fusion import cuda_launches

    return cuda_launches
