# SPDX-License-Identifier: Apache-2.0
"""Plan the dtype in which each op reads each tensor, once all labels are known: `plan_reads`.

Two questions per read. Which copy: the low one where the op takes low and one is stored (or is to
be made by the kernel that makes the value), else the full one. And in which dtype the op gets it:
ops of Relax want one dtype for all their arguments, so a low copy is widened where others are
full.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from tvm.ir import GenericConst

from amp_ir.amp.constants import Holds, holds
from amp_ir.amp.decisions import Decision, Mode
from amp_ir.amp.hints import FULL_DTYPE
from amp_ir.amp.kernels import Kind, Places, kind_of
from amp_ir.dialect.registry import DECLARATIONS
from amp_ir.ir.step_graph import Op, StepGraph


@attrs.define(eq=False)
class Reads:
    """The dtypes in which ops get their tensors, and the low copies to make.

    `dtypes` and `through_low` hold a list per op, an entry per tensor that it reads; `through_low`
    says that the low copy is read, though it may be widened for the op. `low_copies` maps a value
    that is full to the position of the first op that reads it low.
    """

    dtypes: list[list[str]] = attrs.field(factory=list)
    through_low: list[list[bool]] = attrs.field(factory=list)
    low_copies: dict[int, int] = attrs.field(factory=dict)


def plan_reads(
    graph: StepGraph,
    decisions: Sequence[Decision],
    places: Places,
    amp_dtype: str,
    output_dtypes: Sequence[str],
) -> Reads:
    """Plan the reads of a step whose ops are all labelled low or full."""
    must_have = _values_with_a_low_reader(graph, decisions, amp_dtype, output_dtypes)
    planner = _Planner(graph, decisions, places, amp_dtype, must_have)
    for op in graph.ops:
        planner.add(op)
    for root in planner.left_low:
        planner.plan.low_copies.pop(root, None)
    return planner.plan


def fits_low_exactly(graph: StepGraph, leaf: int, amp_dtype: str) -> bool:
    """Return whether a value is a constant that the low dtype holds without rounding."""
    constant = graph.values[leaf].expr
    if not isinstance(constant, GenericConst):
        return False
    return holds(constant.value.numpy(), amp_dtype) is Holds.EXACTLY


def _values_with_a_low_reader(
    graph: StepGraph, decisions: Sequence[Decision], amp_dtype: str, output_dtypes: Sequence[str]
) -> dict[int, int]:
    """Return values that some op or output needs low, with the position of the first such op."""
    found: dict[int, int] = {}
    for op in graph.ops:
        if op.is_view:
            continue
        for leaf, mode in zip(op.reads, decisions[op.position].modes, strict=True):
            if mode is Mode.LOW:
                found.setdefault(graph.values[leaf].root, op.position)
    for leaf, dtype in zip(graph.outputs, output_dtypes, strict=True):
        if dtype == amp_dtype and graph.values[leaf].dtype == FULL_DTYPE:
            found.setdefault(graph.values[leaf].root, len(graph.ops))
    return found


class _Planner:
    def __init__(
        self,
        graph: StepGraph,
        decisions: Sequence[Decision],
        places: Places,
        amp_dtype: str,
        must_have: dict[int, int],
    ) -> None:
        self.graph = graph
        self.decisions = decisions
        self.places = places
        self.amp_dtype = amp_dtype
        self.must_have = must_have
        self.plan = Reads(low_copies=dict(must_have))
        self.left_low = {
            leaf
            for op in graph.ops
            if decisions[op.position].label == "low" and not op.is_view
            for leaf, follows in zip(op.results, decisions[op.position].follows, strict=True)
            if follows
        }

    def add(self, op: Op) -> None:
        decision = self.decisions[op.position]
        takes_low = [
            self.takes_low(op, leaf, mode, is_low=decision.label == "low")
            for leaf, mode in zip(op.reads, decision.modes, strict=True)
        ]
        for leaf, low in zip(op.reads, takes_low, strict=True):
            value = self.graph.values[leaf]
            if low and not value.is_constant:
                self.plan.low_copies.setdefault(value.root, op.position)
        self.plan.through_low.append(takes_low)
        self.plan.dtypes.append(self.dtypes(op, decision, takes_low))

    def takes_low(self, op: Op, leaf: int, mode: Mode, *, is_low: bool) -> bool:
        """Return whether `op`, labelled low or not, reads the low copy of this tensor."""
        value = self.graph.values[leaf]
        if mode is Mode.LOW:
            return True
        is_willing = mode is Mode.EITHER or (mode is Mode.VARY and is_low)
        if not is_willing or value.is_constant:
            return False
        if value.root in self.left_low:
            return True
        maker = self.graph.values[value.root].op
        if maker < 0:
            return False
        if kind_of(self.graph.ops[maker]) is not Kind.LOOP:
            return value.root in self.must_have
        # In a kernel that computes the value, the op has it in float32 without reading memory.
        return not self.places[op.position] <= self.places[maker]

    def dtypes(self, op: Op, decision: Decision, takes_low: Sequence[bool]) -> list[str]:
        """Return the dtype in which the op gets each tensor."""
        own = [self.graph.values[leaf].dtype for leaf in op.reads]
        as_read = [
            self.amp_dtype if low else dtype for low, dtype in zip(takes_low, own, strict=True)
        ]
        if not self.wants_one_dtype(op, decision):
            return as_read
        # The arguments that must agree; in an op of ours, one that is full by rule may differ.
        together = [
            mode is not Mode.KEEP and not (op.name in DECLARATIONS and mode is Mode.FULL)
            for mode in decision.modes
        ]
        can_be_low = [
            low or fits_low_exactly(self.graph, leaf, self.amp_dtype)
            for leaf, low in zip(op.reads, takes_low, strict=True)
        ]
        agree_on_low = any(takes_low) and all(
            can for can, is_one in zip(can_be_low, together, strict=True) if is_one
        )
        return [
            (self.amp_dtype if agree_on_low else dtype) if is_one else read
            for read, dtype, is_one in zip(as_read, own, together, strict=True)
        ]

    def wants_one_dtype(self, op: Op, decision: Decision) -> bool:
        is_loose = Mode.VARY in decision.modes or Mode.EITHER in decision.modes
        if op.name in DECLARATIONS:
            return Mode.VARY in decision.modes
        return is_loose or Mode.LOW not in decision.modes
