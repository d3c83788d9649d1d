# SPDX-License-Identifier: Apache-2.0
"""Fuse kernels that read only the step's inputs, horizontally: above all casts of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import tvm
from tvm import relax, tirx

from amp_ir.ir.dataflow import KERNEL_CALL
from amp_ir.ir.location import join_spans
from amp_ir.memory.buffers import Buffer, Call
from amp_ir.memory.liveness import Liveness
from amp_ir.memory.roles import is_cast


class KernelMerger(Protocol):
    """Write the kernel of several calls that may run at once; the loops stage has one."""

    def most_parameters(self) -> int:
        """Return how many parameters a fused kernel may have."""

    def takes(self, function: tirx.PrimFunc) -> bool:
        """Return whether the kernel can be one of the merged."""

    def merge(
        self, calls: Sequence[tuple[str, tirx.PrimFunc, Sequence[Any]]]
    ) -> tuple[tirx.PrimFunc, list[Any]]:
        """Return the kernel of calls (name, function, arguments), and its arguments, each once."""


def fuse_input_kernels(ir: tvm.IRModule, live: Liveness, merger: KernelMerger) -> tvm.IRModule:
    """Fuse calls that read only the step's inputs into few launches.

    Before:  a = cast(w1); y = matmul(x, a); b = cast(w2); z = matmul(y, b)
    After:   (a, b) = merged_0(w1, w2); y = matmul(x, a); z = matmul(y, b)

    A call moves up to the first of its group while what it makes can be held from there on without
    raising the peak; else it begins another group. Weights in low precision are held from the
    forward to the backward pass anyway: the added bytes are held before the peak.

    Requires: the calls are in their final order.
    Ensures:  every element is computed by the same code; the most bytes alive at once do not grow.

    Returns the module with the kernels that the step calls now.
    """
    program = live.program
    groups = [one for one in _groups(live, merger) if len(one) > 1]
    kernels: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}
    merged: dict[int, Call] = {}
    for group in groups:
        variable = tvm.ir.GlobalVar(f"merged_{len(kernels)}")
        calls = [program.calls[position] for position in group]
        merged[group[0]], kernels[variable] = _merged(calls, variable, merger)
    live.splice(
        {position: [call] for position, call in merged.items()},
        removed=[position for group in groups for position in group],
    )
    called = {call.symbol for call in program.calls if call.function is not None} | {"main"}
    kept = {name: one for name, one in ir.functions.items() if name.name_hint in called}
    return tvm.IRModule({**kept, **kernels}, attrs=ir.attrs)


@attrs.define
class _Group:
    """Positions of calls that become one, and the parameters of its kernel."""

    positions: list[int]
    parameter_count: int


def _groups(live: Liveness, merger: KernelMerger) -> list[list[int]]:
    """Return the positions of the calls to be merged, group by group."""
    program, held, most = live.program, live.at, live.most
    inputs = {id(buffer) for buffer in program.inputs}
    results = {id(buffer) for buffer in program.results}
    takes: dict[str, bool] = {}
    groups: list[_Group] = []
    # Reports say what values and calls are by the ops and phases of a call: those that only cast,
    # and those of each phase, form their own groups.
    latest: dict[tuple[bool, frozenset[str]], _Group] = {}
    for position, call in enumerate(program.calls):
        if not _reads_inputs_only(call, inputs, results):
            continue
        if call.symbol not in takes:
            takes[call.symbol] = merger.takes(call.function)
        if not takes[call.symbol]:
            continue
        made = sum(live.nbytes(buffer) for buffer in call.results)
        count = len(call.arguments) + len(call.results)
        kind = is_cast(call), frozenset(call.phases)
        group = latest.get(kind)
        if group is not None and group.parameter_count + count <= merger.most_parameters():
            between = held[group.positions[0] : position]
            if int(between.max()) + made <= most:
                between += made
                group.positions.append(position)
                group.parameter_count += count
                continue
        groups.append(_Group([position], count))
        latest[kind] = groups[-1]
    return [group.positions for group in groups]


def _reads_inputs_only(call: Call, inputs: set[int], results: set[int]) -> bool:
    """Return whether a kernel reads inputs alone, and only the step itself reads its results.

    What the step returns may be written over an input that others have yet to read.
    """
    if call.function is None or call.is_rerun:
        return False
    reads = all(isinstance(one, Buffer) and id(one) in inputs for one in call.arguments)
    return reads and not any(id(buffer) in results for buffer in call.results)


def _merged(
    calls: list[Call], variable: tvm.ir.GlobalVar, merger: KernelMerger
) -> tuple[Call, tirx.PrimFunc]:
    function, arguments = merger.merge([(one.symbol, one.function, one.reads) for one in calls])
    function = function.with_attr("global_symbol", variable.name_hint)
    ops = ",".join(dict.fromkeys(op for call in calls for op in call.ops))
    made = ",".join(buffer.op for call in calls for buffer in call.results)
    expr = relax.Call(
        tvm.ir.Op.get(KERNEL_CALL),
        [variable, relax.Tuple([buffer.parameter for buffer in arguments])],
        tvm.ir.make_node("ir.DictAttrs", ops=ops, result_ops=made),
        [relax.TupleType([one for call in calls for one in _types(call.expr)])],
        join_spans(call.expr.span for call in calls),
    )
    results = [buffer for call in calls for buffer in call.results]
    return Call(expr, function, list(arguments), results), function


def _types(call: relax.Call) -> list[relax.Type]:
    type_ = call.ty_args[0]
    return list(type_.fields) if isinstance(type_, relax.TupleType) else [type_]
