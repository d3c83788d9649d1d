# SPDX-License-Identifier: Apache-2.0
"""Hand-written kernels on a GPU: each parallel loop becomes a launch, one thread per iteration.

Their loops are written for a CPU: tasks that share nothing, each taking its items in order. On a
GPU the tasks are threads, and vectors are loops. A statement outside of parallel loops is a launch
of one thread.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.tirx import For, ForKind

from amp_ir.loops.codegen.kernel import Kernel, OpaqueBuffers
from amp_ir.loops.codegen.kernel_buffers import memory_scope
from amp_ir.loops.codegen.statements import statements_of
from amp_ir.loops.cuda.launch import launch
from amp_ir.loops.ir import Opaque

# Tasks are long and few: small blocks spread them over more multiprocessors.
_THREADS = 64


def emit_opaque(results: list[Opaque]) -> Kernel:
    """Emit the kernel that computes these results."""
    kernel = results[0].kernel
    buffers = OpaqueBuffers.declare(kernel)
    if kernel.emit_cuda is not None:
        statements = kernel.emit_cuda(*buffers.arguments)
    else:
        with memory_scope("local"):
            body = kernel.emit(*buffers.arguments)
        statements = [
            one if isinstance(one, tirx.AllocBuffer) else _launched(one)
            for one in statements_of(body)
        ]
    return buffers.finish(statements, results)


def _launched(statement: tirx.Stmt) -> tirx.Stmt:
    if not (isinstance(statement, For) and statement.kind == ForKind.PARALLEL):
        return launch(1, 1, lambda _block, _thread: [_serial(statement)])
    extent = int(statement.extent)
    blocks = -(-extent // _THREADS)

    def body(block: Any, thread: Any) -> list[tirx.Stmt]:
        at = block * _THREADS + thread
        inner: tirx.Stmt = tirx.SeqStmt(
            [tirx.Bind(statement.loop_var, at), _serial(statement.body)]
        )
        if extent % _THREADS:
            inner = tirx.IfThenElse(at < extent, inner, None)
        return [inner]

    return launch(blocks, _THREADS, body)


def _serial(statement: tirx.Stmt) -> tirx.Stmt:
    """Make loops of every other kind in the statement serial."""

    def visit(loop: For) -> For:
        return For(loop.loop_var, loop.min, loop.extent, ForKind.SERIAL, loop.body)

    return tvm_ffi.structural_map(statement, (For, visit))
