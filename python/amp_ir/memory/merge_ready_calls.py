# SPDX-License-Identifier: Apache-2.0
"""Merge kernels that wait for nothing: above all the casts of weights to low precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import tvm
from tvm import relax, tirx

from amp_ir.ir.location import join_spans
from amp_ir.ir.step_module import OutputSpec
from amp_ir.memory.buffers import Slot, Step, StepSlots
from amp_ir.memory.live_bytes import LiveBytes
from amp_ir.memory.roles import is_cast

KERNEL_CALL = "relax.call_tir"


class KernelMerger(Protocol):
    """Write the kernel of several calls that may run at once; the loops stage has one."""

    def most_parameters(self) -> int:
        """Return how many parameters a merged kernel may have."""

    def takes(self, function: tirx.PrimFunc) -> bool:
        """Return whether the kernel can be one of the merged."""

    def merge(
        self, calls: Sequence[tuple[str, tirx.PrimFunc, Sequence[Any]]]
    ) -> tuple[tirx.PrimFunc, list[Any]]:
        """Return the kernel of calls (name, function, arguments), and its arguments, each once."""


def merge_ready_calls(
    ir: tvm.IRModule, program: StepSlots, outputs: Sequence[OutputSpec], merger: KernelMerger
) -> tvm.IRModule:
    """Merge calls that read only the step's inputs into few launches.

    Before:  a = cast(w1); y = matmul(x, a); b = cast(w2); z = matmul(y, b)
    After:   (a, b) = merged_0(w1, w2); y = matmul(x, a); z = matmul(y, b)

    A call moves up to the first of its group while what it makes can be held from there on without
    raising the peak; else it begins another group. Weights in low precision are held from the
    forward to the backward pass anyway: the added bytes are held before the peak.

    Requires: `program` in its final order.
    Ensures:  every element is computed by the same code; the most bytes alive at once do not grow.

    Returns the module with the kernels that `program` calls now.
    """
    groups = [one for one in _groups(program, outputs, merger) if len(one) > 1]
    kernels: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}
    merged: dict[int, Step] = {}
    for group in groups:
        variable = tvm.ir.GlobalVar(f"merged_{len(kernels)}")
        steps = [program.steps[position] for position in group]
        merged[group[0]], kernels[variable] = _merged(steps, variable, merger)
    moved = {position for group in groups for position in group}
    program.steps[:] = [
        merged.get(position, step)
        for position, step in enumerate(program.steps)
        if position in merged or position not in moved
    ]
    called = {step.symbol for step in program.steps if step.function is not None} | {"main"}
    kept = {name: one for name, one in ir.functions.items() if name.name_hint in called}
    return tvm.IRModule({**kept, **kernels}, attrs=ir.attrs)


@attrs.define
class _Group:
    """Positions of calls that become one, and the parameters of its kernel."""

    positions: list[int]
    parameter_count: int


def _groups(
    program: StepSlots, outputs: Sequence[OutputSpec], merger: KernelMerger
) -> list[list[int]]:
    """Return the positions of the calls to be merged, group by group."""
    live = LiveBytes(program, outputs)
    held, most = live.at.copy(), live.most
    inputs = {id(slot) for slot in program.inputs}
    results = {id(slot) for slot in program.results}
    takes: dict[str, bool] = {}
    groups: list[_Group] = []
    # Reports say what values and calls are by the ops and phases of a call: those that only cast,
    # and those of each phase, form their own groups.
    latest: dict[tuple[bool, frozenset[str]], _Group] = {}
    for position, step in enumerate(program.steps):
        if not _is_ready(step, inputs, results):
            continue
        if step.symbol not in takes:
            takes[step.symbol] = merger.takes(step.function)
        if not takes[step.symbol]:
            continue
        made = sum(live.nbytes(slot) for slot in step.results)
        count = len(step.arguments) + len(step.results)
        kind = is_cast(step), frozenset(step.phases)
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


def _is_ready(step: Step, inputs: set[int], results: set[int]) -> bool:
    """Return whether a kernel reads inputs alone, and only the step itself reads its results.

    What the step returns may be written over an input that others have yet to read.
    """
    if step.function is None or step.is_rerun:
        return False
    reads = all(isinstance(one, Slot) and id(one) in inputs for one in step.arguments)
    return reads and not any(id(slot) in results for slot in step.results)


def _merged(
    steps: list[Step], variable: tvm.ir.GlobalVar, merger: KernelMerger
) -> tuple[Step, tirx.PrimFunc]:
    calls = [(step.symbol, step.function, step.reads) for step in steps]
    function, arguments = merger.merge(calls)
    function = function.with_attr("global_symbol", variable.name_hint)
    ops = ",".join(dict.fromkeys(op for step in steps for op in step.ops))
    made = ",".join(slot.op for step in steps for slot in step.results)
    call = relax.Call(
        tvm.ir.Op.get(KERNEL_CALL),
        [variable, relax.Tuple([slot.parameter for slot in arguments])],
        tvm.ir.make_node("ir.DictAttrs", ops=ops, result_ops=made),
        [relax.TupleType([one for step in steps for one in _types(step.call)])],
        join_spans(step.call.span for step in steps),
    )
    results = [slot for step in steps for slot in step.results]
    return Step(call, function, list(arguments), results), function


def _types(call: relax.Call) -> list[relax.Type]:
    type_ = call.ty_args[0]
    return list(type_.fields) if isinstance(type_, relax.TupleType) else [type_]
