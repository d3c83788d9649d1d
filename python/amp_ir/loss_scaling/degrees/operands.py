# SPDX-License-Identifier: Apache-2.0
"""The operands of a call as a degree rule (relax_rules.py) sees them, and the rule's errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import attrs
import numpy
from tvm import relax

from amp_ir.dialect.registry import DECLARATIONS, options_of
from amp_ir.ir.step_graph import Op, StepGraph
from amp_ir.loss_scaling.degrees.degree import ZERO, Degree, Solver, Special, ValueDegree

Known: TypeAlias = "Degree | Special"


class DegreesDiffer(Exception):
    """Two operands must have the same degree and do not; `positions` names the operands."""

    def __init__(self, first: int, second: int) -> None:
        self.positions = (first, second)


class NotScaled(Exception):
    """An operand that is divided by the loss scale was not multiplied by it exactly once."""

    def __init__(self, position: int) -> None:
        self.position = position


class CannotTell(Exception):
    """The results have no degree, or the rule cannot determine it; `position` is the cause."""

    def __init__(self, position: int) -> None:
        self.position = position


@attrs.define(eq=False)
class Operands:
    """The tensors that a call reads, with tuples flattened.

    `numbers[k]` is the value of an operand that is one constant number, else None; `shapes` and
    `dtypes` are those of the operands, `result_dtypes` and `result_shapes` of the results.
    `options` has the call's own. A rule sets `guarded_by` to the operand that it treats as a guard,
    and `assumed_linear` where it takes an op that it does not know for linear.
    """

    degrees: Sequence[Known]
    numbers: Sequence[float | None]
    shapes: Sequence[tuple[int, ...]]
    result_shapes: Sequence[tuple[int, ...]]
    result_dtypes: Sequence[str]
    options: Callable[[str], Any]
    solver: Solver
    guarded_by: int | None = None
    assumed_linear: bool = False

    def degree(self, position: int) -> Known:
        """Return the degree of one operand, with all known substitutions."""
        known = self.degrees[position]
        return self.solver.resolve(known) if isinstance(known, Degree) else known

    def is_plain(self, position: int) -> bool:
        """Return whether an operand does not depend on the loss scale."""
        return self.degree(position) in (ZERO, Special.ANY)

    def expect_plain(self, *positions: int) -> None:
        """Require that operands do not depend on the loss scale."""
        for position in positions:
            if not self.is_plain(position):
                raise CannotTell(position)

    def join(self, *positions: int) -> Known:
        """Return the one degree that these operands share."""
        first: int | None = None
        for position in positions:
            known = self.degrees[position]
            if not isinstance(known, Degree):
                continue
            if first is None:
                first = position
            elif not self.solver.equate(self._number(first), known):
                raise DegreesDiffer(first, position)
        return Special.ANY if first is None else self.degree(first)

    def total(self, *positions: int) -> Known:
        """Return the degree of a product of these operands."""
        total = ZERO
        for position in positions:
            degree = self.degree(position)
            if not isinstance(degree, Degree):
                return Special.ANY  # a product with 0 is 0 at every scale
            total = total + degree
        return total

    def _number(self, position: int) -> Degree:
        degree = self.degrees[position]
        assert isinstance(degree, Degree)
        return degree


def degrees_of_constants(graph: StepGraph) -> list[ValueDegree]:
    """Return a degree for each value, of which only those of the constants are known."""
    return [
        Special.ANY
        if value.expr is not None and value.is_constant and _is_scale_free(value.expr)
        else ZERO
        for value in graph.values
    ]


def operands_of(
    graph: StepGraph, op: Op, degrees: Sequence[ValueDegree], solver: Solver
) -> Operands:
    """Return an op's operands as its rule sees them; all of their degrees are known."""
    values = [graph.values[leaf] for leaf in op.reads]
    results = [graph.values[leaf] for leaf in op.results]
    return Operands(
        degrees=[degrees[leaf] for leaf in op.reads],  # type: ignore[misc]
        numbers=[_number(value.expr) if value.is_constant else None for value in values],
        shapes=[value.shape for value in values],
        result_shapes=[value.shape for value in results],
        result_dtypes=[value.dtype for value in results],
        options=lambda name: _option(op, name),
        solver=solver,
    )


def _is_scale_free(constant: relax.Expr) -> bool:
    """Return whether a constant holds only zeros, infinities and NaN."""
    wide = constant.value.numpy().astype(numpy.float64)
    return bool(((wide == 0) | ~numpy.isfinite(wide)).all())


def _number(expr: relax.Expr | None) -> float | None:
    """Return the number that a constant holds, if it holds exactly one."""
    if expr is None:
        return None
    numbers = expr.value.numpy()
    return float(numbers.reshape(-1)[0]) if numbers.size == 1 else None


def _option(op: Op, name: str) -> Any:
    if op.name in DECLARATIONS:
        return options_of(op.call).get(name)
    return getattr(op.call.attrs, name, None)
