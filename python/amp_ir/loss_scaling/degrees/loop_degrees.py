# SPDX-License-Identifier: Apache-2.0
"""Degrees of the results of a loop: its body is walked until a step begins as the one before."""

from __future__ import annotations

from collections.abc import Sequence

from amp_ir.dialect.loop import CARRIED, ENTRY, Loop
from amp_ir.ir.step_graph import Op, StepGraph, read_step
from amp_ir.loss_scaling.degrees.degree import Degree, Solver, Special, ValueDegree
from amp_ir.loss_scaling.degrees.diagnostics import Diagnostics
from amp_ir.loss_scaling.degrees.operands import (
    CannotTell,
    DegreesDiffer,
    NotScaled,
    degrees_of_constants,
    operands_of,
)
from amp_ir.loss_scaling.degrees.relax_rules import RULES


class StepsNeeded(Exception):  # noqa: N818 (it says what was found)
    """What a loop does cannot be said without its single steps."""


def degrees_of_loop(
    loop: Loop, given: Sequence[ValueDegree], solver: Solver, diagnostics: Diagnostics
) -> list[ValueDegree]:
    """Return the degrees of a loop's results, from those of its operands.

    Raises:
        StepsNeeded: its body has an error, or steps whose values have different degrees.
    """
    steps = _Body(read_step(loop.body), solver, diagnostics).steps(loop, given)
    return [
        _joined([made[k] for made in steps], solver) if kind == ENTRY else steps[-1][k]
        for k, (kind, _, _) in enumerate(loop.outputs)
    ]


def _joined(degrees: Sequence[ValueDegree], solver: Solver) -> ValueDegree:
    """Return the one degree of a value in all steps."""
    known = [one for one in degrees if isinstance(one, Degree)]
    if not all(solver.equate(known[0], one) for one in known):
        raise StepsNeeded
    return known[0] if known else degrees[0]


class _Body:
    """The walks over the body of a loop."""

    def __init__(self, graph: StepGraph, solver: Solver, diagnostics: Diagnostics) -> None:
        self.graph, self.solver, self.diagnostics = graph, solver, diagnostics

    def steps(self, loop: Loop, given: Sequence[ValueDegree]) -> list[list[ValueDegree]]:
        """Return the degrees of the body's outputs in each step that differs from its neighbour.

        Raises:
            StepsNeeded: an error, or a degree that is unknown.
        """
        made: list[list[ValueDegree]] = []
        before: list[ValueDegree] = []
        for _ in range(loop.length):
            now = [
                made[-1][first] if kind == CARRIED and made else one
                for (kind, first, _), one in zip(loop.inputs, given, strict=True)
            ]
            now = [self._resolved(one) for one in now]
            if now == before:
                break
            made.append(self._once(now))
            before = now
        return made

    def _once(self, given: Sequence[ValueDegree]) -> list[ValueDegree]:
        degrees: list[ValueDegree] = degrees_of_constants(self.graph)
        for leaf, degree in zip(self.graph.inputs, given, strict=True):
            degrees[leaf] = degree
        for op in self.graph.ops:
            for leaf, degree in zip(op.results, self._of_op(op, degrees), strict=True):
                degrees[leaf] = degree
        return [degrees[leaf] for leaf in self.graph.outputs]

    def _of_op(self, op: Op, degrees: Sequence[ValueDegree]) -> Sequence[ValueDegree]:
        rule = RULES.get(op.name)
        if rule is None or not all(_is_known(degrees[leaf]) for leaf in op.reads):
            raise StepsNeeded
        operands = operands_of(self.graph, op, degrees, self.solver)
        try:
            result = rule(operands)
        except (CannotTell, DegreesDiffer, NotScaled):
            raise StepsNeeded from None
        self.diagnostics.note_assumptions(op, operands)
        return list(result) if isinstance(result, tuple) else [result]

    def _resolved(self, degree: ValueDegree) -> ValueDegree:
        return self.solver.resolve(degree) if isinstance(degree, Degree) else degree


def _is_known(degree: ValueDegree) -> bool:
    return isinstance(degree, Degree) or degree is Special.ANY
