# SPDX-License-Identifier: Apache-2.0
"""Writes CUDA kernels by hand as PrimFuncs with thread bindings, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import tirx
from tvm.tirx import For, ForKind

ALL_LANES = tirx.const(0xFFFFFFFF, "uint32")


def parameter(count: int, dtype: str, name: str) -> Any:
    """Memory that the caller gives."""
    return tirx.decl_buffer((count,), dtype, name)


def local(count: int, dtype: str, name: str) -> Any:
    """Registers of a thread."""
    return tirx.decl_buffer((count,), dtype, name, scope="local")


def shared(count: int, dtype: str, name: str) -> Any:
    """Memory of a block."""
    return tirx.decl_buffer((count,), dtype, name, scope="shared")


def allocate(buffer: Any) -> tirx.Stmt:
    """Make registers or shared memory."""
    return tirx.AllocBuffer(buffer)


def load(buffer: Any, at: Any) -> Any:
    """The element at a position, or a vector of them."""
    return tirx.BufferLoad(buffer, [at])


def store(buffer: Any, at: Any, value: Any) -> tirx.Stmt:
    """Store an element or a vector of them."""
    return tirx.BufferStore(buffer, value, [at])


def vector(start: Any, lanes: int) -> Any:
    """The positions of `lanes` neighbours."""
    return tirx.Ramp(start, 1, lanes)


def loop(extent: int, body: Callable[[Any], tirx.Stmt]) -> tirx.Stmt:
    """A loop that the CUDA compiler unrolls."""
    i = tirx.Var("i", "int32")
    return For(i, 0, extent, ForKind.UNROLLED, body(i))


def when(condition: Any, body: tirx.Stmt) -> tirx.Stmt:
    """Do something under a condition."""
    return tirx.IfThenElse(condition, body, None)


def synchronise() -> tirx.Stmt:
    """Wait for the threads of the block."""
    return tirx.Evaluate(tirx.op.tvm_storage_sync("shared"))


def sequence(*statements: tirx.Stmt) -> tirx.Stmt:
    """Statements as one."""
    return statements[0] if len(statements) == 1 else tirx.SeqStmt(list(statements))


def one_launch(blocks: int, threads: int, body: Callable[[Any, Any], tirx.Stmt]) -> tirx.Stmt:
    """A launch of `body(block, thread)`."""
    block, thread = tirx.Var("block", "int32"), tirx.Var("thread", "int32")
    return _bound(
        "blockIdx.x", block, blocks, _bound("threadIdx.x", thread, threads, body(block, thread))
    )


def _bound(tag: str, variable: tirx.Var, extent: int, body: tirx.Stmt) -> tirx.Stmt:
    index = tirx.IterVar(tvm.ir.Range(0, extent), variable, tirx.IterVar.ThreadIndex, tag)
    return tirx.AttrStmt(index, "thread_extent", tirx.IntImm("int32", extent), body)
