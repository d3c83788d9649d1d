# SPDX-License-Identifier: Apache-2.0
"""Ask for the memory of later vectors while a CPU kernel computes with earlier ones."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import sym, tirx
from tvm.ir import TensorLoad
from tvm.tirx import For, ForKind
from tvm.tirx.analysis import undefined_vars

# Elements between what is computed and what is asked for: 4 KiB of bfloat16, 8 of float32. A CPU's
# own prefetching stops at the end of a page of 4 KiB.
AHEAD = 2048
# Arguments of llvm.prefetch: to read, to keep in all caches, data.
_READ, _KEEP, _DATA = 0, 3, 1


def prefetch_streams(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """Prefetch what a loop over vectors reads along its tensors.

    Before:  for step in range(n): for lane in vectorized(16): y[16 step + lane] = x[16 step + lane]
    After:   for step in range(n): prefetch(x[16 step + 2048]); for lane in ...

    A vector of GELU's gradient is some 90 instructions: a CPU looks ahead by a few vectors only,
    and waits for memory after it has computed. An address outside a tensor is asked for in vain.
    Results are not asked for: many overwrite an argument, and asking twice slows optimizers.

    Requires: indices without needless divisions, see `simplify_indices`.
    Ensures:  the same elements are read and written.
    """
    tensors = {one for one in kernel.params if isinstance(one.ty, tirx.BufferType)}

    def with_prefetches(loop: For) -> For:
        if loop.kind != ForKind.SERIAL or not isinstance(loop.body, For):
            return loop
        if loop.body.kind != ForKind.VECTORIZED:
            return loop
        ahead = [_prefetch(*one) for one in _streams(loop.body, loop.loop_var, tensors)]
        if not ahead:
            return loop
        body = tirx.SeqStmt([*ahead, loop.body])
        return For(loop.loop_var, loop.min, loop.extent, loop.kind, body, None, loop.annotations)

    return kernel.with_body(tvm_ffi.structural_map(kernel.body, (For, with_prefetches)))


def _prefetch(tensor: tirx.Var, index: Any) -> tirx.Stmt:
    address = tirx.address_of(tirx.BufferLoad(tensor, [index + AHEAD]))
    options = [tirx.const(one, "int32") for one in (_READ, _KEEP, _DATA)]
    call = tirx.call_llvm_intrin("void", "llvm.prefetch.p0", address, *options)
    return tirx.Evaluate(call)


def _streams(vector: For, step: tirx.Var, tensors: set[Any]) -> list[tuple[tirx.Var, Any]]:
    """Return the tensors whose elements follow each other, with the index of a vector's first."""
    known = {*undefined_vars(vector), vector.loop_var}
    analyzer = sym.Analyzer()
    streams: dict[Any, tuple[tirx.Var, Any]] = {}
    for found in _loads(vector.body):
        tensor, index = found.source, found.indices[0]
        if tensor not in tensors or not known.issuperset(undefined_vars(index)) or _loads(index):
            continue
        lane = vector.loop_var
        first = _with(index, {lane: tirx.const(0, "int32")})
        next_element = _with(index, {lane: tirx.const(1, "int32")})
        next_vector = _with(first, {step: step + 1})
        is_stream = analyzer.can_prove_equal(next_element - first, 1)
        if is_stream and analyzer.can_prove_equal(next_vector - first, vector.extent):
            first = analyzer.simplify(first)
            key = tvm_ffi.StructuralKey([tensor, first])  # type: ignore[call-arg]
            streams.setdefault(key, (tensor, first))
    return list(streams.values())


def _loads(part: Any) -> list[TensorLoad]:
    found: list[TensorLoad] = []
    tvm_ffi.structural_walk(part, [(TensorLoad, found.append)])
    return found


def _with(index: Any, known: dict[Any, Any]) -> Any:
    return tvm_ffi.structural_map(index, (tirx.Var, lambda one: known.get(one, one)))
