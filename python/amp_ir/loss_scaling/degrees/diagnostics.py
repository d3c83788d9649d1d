# SPDX-License-Identifier: Apache-2.0
"""Diagnostics of the scale-degree analysis: errors with their repair, and notes."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import attrs

from amp_ir.errors import LossScaleError
from amp_ir.ir.location import Location
from amp_ir.ir.short_list import short_names
from amp_ir.ir.step_graph import Op, StepGraph
from amp_ir.ir.step_module import InputSpec, OutputSpec, Role
from amp_ir.loss_scaling.degrees.degree import Degree, Solver, Unknown, Words
from amp_ir.loss_scaling.degrees.operands import Operands

_MOST_SHOWN = 20
_MOST_NAMED = 3
# Ops that compare a value with another one, rather than combine the two.
_COMPARING = frozenset(
    f"relax.{name}"
    for name in "minimum maximum equal not_equal less less_equal greater greater_equal".split()
)

_UNSCALE_FIRST = (
    "The gradients are still multiplied by the loss scale here: call scaler.unscale_(optimizer) "
    "before this line, or move the line after the block of amp_ir.scale_loss"
)
_STEP_BY_SCALER = (
    "The gradients are still multiplied by the loss scale here: call scaler.step(optimizer) "
    "instead of optimizer.step()"
)
_SCALE_ALL = (
    "Gradients of a loss that was scaled meet those of one that was not: scale every loss, "
    "scaler.scale(loss).backward(), or their sum"
)
_SCALE_THE_NUMBER = (
    "Gradients are still multiplied by the loss scale in a backward pass, so in hooks: multiply "
    "the number by scaler.get_scale()"
)
_PENALTY = (
    "One of them comes through gradients that were still scaled when a loss was computed from "
    "them, as a gradient penalty does: multiply what torch.autograd.grad returned by "
    "1.0 / scaler.get_scale() first"
)
_SCALE_ONCE = (
    "Scale the loss once, scaler.scale(loss).backward(), and leave it to unscale_ or step of the "
    "same scaler to divide its gradients by the scale, once"
)
_DIVIDE_FIRST = (
    "Divide by the scale before this line: multiply what torch.autograd.grad returned by "
    "1.0 / scaler.get_scale(); for the .grad of parameters call scaler.unscale_(optimizer)"
)
_SCALE_THE_SUM = (
    "Compute with values that are not scaled, and scale the result: scaler.scale(a + b), not "
    "scaler.scale(a) + b"
)
_STORE_UNSCALED = (
    "The loss scale changes between calls, so state must not depend on it: divide by "
    "scaler.get_scale() before it is stored"
)


class Kind(enum.Enum):
    """The kind of an error at an op."""

    DIFFER = "two operands must have one degree"
    NOT_SCALED = "what is unscaled was not scaled once"


@attrs.frozen(eq=False)
class Diagnostic:
    """A root cause at `op`; `positions` are the operands that it is about."""

    kind: Kind
    op: Op
    positions: tuple[int, ...]
    operands: Operands


@attrs.define
class _Line:
    """A line of the error; ops of one source line and phase share it, with the first op's text."""

    location: Location
    what: str
    advice: str
    count: int = 1

    def __str__(self) -> str:
        more = f" (and {self.count - 1} more ops of this line)" if self.count > 1 else ""
        return f"{self.location}: {self.what}{more}. {self.advice}"


class Diagnostics:
    """The diagnostics of one analysis."""

    def __init__(
        self,
        graph: StepGraph,
        inputs: Sequence[InputSpec],
        scalers: Sequence[str],
        solver: Solver,
    ) -> None:
        self._graph = graph
        self._names = {leaf: spec.name for leaf, spec in zip(graph.inputs, inputs, strict=True)}
        self._words = Words(scalers)
        self._solver = solver
        self._kept_gradients = {
            leaf
            for leaf, spec in zip(graph.inputs, inputs, strict=True)
            if spec.role is Role.GRADIENT
        }
        self._gradients = _gradients(graph, self._kept_gradients)
        self._lines: dict[tuple[object, ...], _Line] = {}
        self._harmless: dict[tuple[object, ...], _Line] = {}
        self._notes: dict[str, list[str]] = {}
        self._assumed: dict[str, str] = {}

    @property
    def count(self) -> int:
        """Return how many places the error would list, without those that only explain others."""
        return len(self._lines)

    def add(self, diagnostic: Diagnostic) -> None:
        """Record a root cause; several on one source line count as one."""
        _count(self._lines, self._line(diagnostic), diagnostic.op.location)

    def add_harmless(self, diagnostic: Diagnostic) -> None:
        """Record an error that no state depends on; it may explain one in the backward pass."""
        _count(self._harmless, self._line(diagnostic), diagnostic.op.location)

    def wrong_state(self, leaf: int, spec: OutputSpec, degree: Degree, expected: Degree) -> None:
        """Record a state tensor whose degree after the step differs from that before it."""
        value = self._graph.values[leaf]
        location = self._graph.ops[value.op].location if value.op >= 0 else Location()
        after, before = self._words.of(degree), self._words.of(expected)
        what = f"{spec.name} is {after} after the step, and {before} before it"
        advice = _STEP_BY_SCALER if location.phase == "optimizer" else _STORE_UNSCALED
        _count(self._lines, _Line(location, what, advice), location)

    def note_assumptions(self, op: Op, operands: Operands) -> None:
        """Record what the rule of an op took for granted."""
        if operands.guarded_by is not None:
            self._guard(op, operands)
        if operands.assumed_linear:
            self._assumed_linear(op, str(operands.options("op")))

    def _guard(self, op: Op, operands: Operands) -> None:
        """Record a small constant that the analysis takes for a guard against a division by 0."""
        assert operands.guarded_by is not None
        degree = operands.degree(1 - operands.guarded_by)
        assert isinstance(degree, Degree)
        number = operands.numbers[operands.guarded_by]
        self._note(
            f"{op.location}: {number:.3g} is taken for a guard against a division by zero beside a "
            f"value that is {self._words.of(degree)}.",
            "",
        )

    def _assumed_linear(self, op: Op, name: str) -> None:
        """Record an op of a backward pass that the analysis does not know."""
        self._note(
            "{}, called in the backward pass, is taken for linear in the gradients that it reads, "
            f"as a vector-Jacobian product is (first in {self._first_place(name, op)}).",
            name.removesuffix(".default"),
        )

    def _first_place(self, name: str, op: Op) -> str:
        return self._assumed.setdefault(name, str(op.location))

    def kept_gradient_of(self, diagnostic: Diagnostic) -> str | None:
        """Return the name of the accumulated .grad that is an operand of a diagnostic."""
        leaves = [self._graph.values[diagnostic.op.reads[k]].root for k in diagnostic.positions]
        return next((self._names[leaf] for leaf in leaves if leaf in self._kept_gradients), None)

    def uncleared(self, name: str) -> None:
        """Record a .grad that the step unscales; whether the user clears it is not visible."""
        self._note(
            "{} must be cleared before the next call, as optimizer.zero_grad() does: the step "
            "leaves unscaled gradients there, and adds scaled ones.",
            name,
        )

    def unknown_output(self, spec: OutputSpec, degree: Unknown) -> None:
        """Record an output whose degree is unknown."""
        self._note(f"Cannot tell how the loss scale enters {{}}: {degree.reason}.", spec.name)

    def scaled_result(self, spec: OutputSpec, degree: Degree) -> None:
        """Record a result that is multiplied by the loss scale."""
        if degree.powers and not self._solver.is_open(degree):
            self._note(f"The step returns {{}} {self._words.of(degree)}.", spec.name)

    def raise_if_any(self) -> None:
        """Raise the error that lists every root cause, in the order of the step."""
        found = list(self._lines.values())
        if not found:
            return
        causes = [one for one in self._harmless.values() if one.location.phase == "forward"]
        others = [one for one in found if one.location.phase != "backward"]
        if causes and len(others) < len(found):
            # A sum of losses feeds no state, but its gradients do, and they meet elsewhere.
            found = causes + others
        lines = [f"  {number}. {line}" for number, line in enumerate(found, 1)]
        if len(lines) > _MOST_SHOWN:
            lines[_MOST_SHOWN:] = [f"  ... and {len(lines) - _MOST_SHOWN} more"]
        places = "1 place" if len(found) == 1 else f"{len(found)} places"
        raise LossScaleError(
            "\n".join([f"this step uses its loss scale wrongly, {places}:", *lines])
        )

    def notes(self) -> tuple[str, ...]:
        """Return all notes, each once."""
        return tuple(
            text.replace("{}", short_names(names, most=_MOST_NAMED))
            for text, names in self._notes.items()
        )

    def sentence(self, diagnostic: Diagnostic) -> str:
        """Describe a diagnostic that affects no state, as the reason why a value has no degree."""
        return f"{diagnostic.op.location}: {self._what(diagnostic)}"

    def why_unknown(self, op: Op, operands: Operands, position: int) -> str:
        """Return why an op's result has no degree."""
        degree = operands.degree(position)
        words = self._words.of(degree) if isinstance(degree, Degree) else "not multiplied by it"
        return f"{op.location}: {op.label} of {self._noun(op, position)} that is {words}"

    def _line(self, diagnostic: Diagnostic) -> _Line:
        return _Line(diagnostic.op.location, self._what(diagnostic), self._advice(diagnostic))

    def _note(self, text: str, name: str) -> None:
        names = self._notes.setdefault(text, [])
        if name and name not in names:
            names.append(name)

    def _what(self, diagnostic: Diagnostic) -> str:
        op, degrees = diagnostic.op, [diagnostic.operands.degree(k) for k in diagnostic.positions]
        words = [self._words.of(one) if isinstance(one, Degree) else "" for one in degrees]
        nouns = [self._noun(op, k) for k in diagnostic.positions]
        if diagnostic.kind is Kind.NOT_SCALED:
            scale = diagnostic.operands.degree(len(op.reads) - 1)
            assert isinstance(scale, Degree)
            name = self._words.scale(scale.powers[0][0])
            return f"{op.label} divides {nouns[0]}, {words[0]}, by {name}"
        verb, link = ("compares", "with") if op.name in _COMPARING else ("combines", "and")
        return f"{op.label} {verb} {nouns[0]}, {words[0]}, {link} {nouns[1]}, {words[1]}"

    def _noun(self, op: Op, position: int) -> str:
        value = self._graph.values[op.reads[position]]
        if value.is_constant:
            assert value.expr is not None
            number = value.expr.value.numpy()
            return f"{float(number.reshape(-1)[0]):.6g}" if number.size == 1 else "a constant"
        if value.root in self._names:
            return self._names[value.root]
        if value.root not in self._gradients:
            return "a value"
        maker = self._graph.ops[self._graph.values[value.root].op]
        is_own = maker.location.phase == "backward"
        return "a gradient" if is_own else "a value computed from gradients"

    def _advice(self, diagnostic: Diagnostic) -> str:
        if diagnostic.kind is Kind.NOT_SCALED:
            return _SCALE_ONCE
        op = diagnostic.op
        reads = [op.reads[position] for position in diagnostic.positions]
        is_plain = any(diagnostic.operands.is_plain(position) for position in diagnostic.positions)
        if op.location.phase == "backward":
            if op.name in _COMPARING and any(self._graph.values[one].is_constant for one in reads):
                return _SCALE_THE_NUMBER
            return _SCALE_ALL if is_plain else _PENALTY
        if op.location.phase == "optimizer":
            return _UNSCALE_FIRST if op.name in _COMPARING else _STEP_BY_SCALER
        of_gradients = any(self._graph.values[leaf].root in self._gradients for leaf in reads)
        return _DIVIDE_FIRST if of_gradients else _SCALE_THE_SUM


def _count(lines: dict[tuple[object, ...], _Line], line: _Line, location: Location) -> None:
    """Add a line, or increment the count of its place; an op without a place is its own."""
    place: tuple[object, ...] = (location.file, location.line, location.phase)
    known = lines.setdefault(place if location.file else (len(lines),), line)
    if known is not line:
        known.count += 1


def _gradients(graph: StepGraph, kept: set[int]) -> set[int]:
    """Return the gradients, `kept` ones included, and all values computed from them."""
    found = set(kept)
    for op in graph.ops:
        if op.location.phase == "backward" or found.intersection(op.reads):
            found.update(op.results)
    return found
