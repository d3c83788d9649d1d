# SPDX-License-Identifier: Apache-2.0
"""Proof that a step uses its loss scale correctly: `check_scale_degrees(step)`.

Every value of the captured step gets a degree (degree.py) by the rules of its op
(relax_rules.py). The loss scale of scaler0 has degree 1 in scaler0; parameters, buffers, optimizer
state, hyper-parameters and the batch have degree 0. Then

- values that are added, compared or selected from must have the same degree;
- a value that is unscaled must have been scaled exactly once;
- every state tensor must leave the step with the degree that it had at entry. A .grad may be
  cleared instead; that can happen outside of the step, so the analysis only adds a note.

A step that violates these rules trains incorrectly, and its results change whenever the scale
does. Only values that the state after the step depends on are checked; a value that is only
returned gets a note.

A loop's body is walked once for each step, until a step begins with the degrees of the one before:
all later ones have the same. Where a body has an error, or a degree that is unknown, the loop is
unrolled for the check, so that the error says what it says of unrolled steps.

Requires: the step as captured, before autocast, whose casts do not change a degree.
Source: the dimensional analysis of physics, with the loss scale as the only unit (Kennedy 1994,
"Dimension types").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import tvm

import amp_ir.loss_scaling.degrees.dialect_rules  # noqa: F401  (registers its rules)
from amp_ir.dialect.loop import NAME as LOOP
from amp_ir.dialect.loop import loop_of
from amp_ir.ir.step_graph import Op, StepGraph, read_step
from amp_ir.ir.step_module import InputSpec, OutputSpec, Role, StepModule
from amp_ir.loss_scaling.degrees.degree import ZERO, Degree, Solver, Special, Unknown, ValueDegree
from amp_ir.loss_scaling.degrees.diagnostics import Diagnostic, Diagnostics, Kind
from amp_ir.loss_scaling.degrees.loop_degrees import StepsNeeded, degrees_of_loop
from amp_ir.loss_scaling.degrees.operands import (
    CannotTell,
    DegreesDiffer,
    NotScaled,
    degrees_of_constants,
    operands_of,
)
from amp_ir.loss_scaling.degrees.relax_rules import INDIFFERENT, RULES

SCALE_SUFFIX = ".scale"


@attrs.frozen
class ScaleDegrees:
    """The degrees of a step and the notes of the analysis.

    `degree` maps the name of each variable of `main` that is an input or bound to a call to its
    degree, or to a tuple of degrees if it is a tuple; `outputs` maps the name of each output.
    `notes` lists, as sentences, what the analysis could not determine and what it assumed.
    """

    degree: Mapping[str, Any] = attrs.field(factory=dict)
    outputs: Mapping[str, ValueDegree] = attrs.field(factory=dict)
    notes: tuple[str, ...] = ()


def _not_unrolled(_ir: tvm.IRModule) -> tvm.IRModule:
    raise NotImplementedError("a step with loops needs `unroll`")


def check_scale_degrees(
    step: StepModule, unroll: Callable[[tvm.IRModule], tvm.IRModule] = _not_unrolled
) -> ScaleDegrees:
    """Return the degree of every value of the step in each loss scale; free without a scaler.

    `unroll` writes the steps of all loops one after the other; not for a step without loops.

    Raises:
        LossScaleError: the step uses a loss scale wrongly; the message lists every place, with
            the user's line and what to do.
    """
    inputs = step.signature.inputs
    scalers = [one.name.removesuffix(SCALE_SUFFIX) for one in inputs if _is_scale(one)]
    if not scalers:
        return ScaleDegrees()
    try:
        analysis = _analysed(step, scalers)
    except StepsNeeded:
        analysis = _analysed(step.with_ir(unroll(step.ir)), scalers)
    analysis.diagnostics.raise_if_any()
    return ScaleDegrees(analysis.by_name(), analysis.by_output(), analysis.diagnostics.notes())


def _analysed(step: StepModule, scalers: Sequence[str]) -> _Analysis:
    """Return the analysis of a step, which may have found errors.

    Raises:
        StepsNeeded: it has loops, and an error.
    """
    graph, inputs, outputs = read_step(step.ir), step.signature.inputs, step.signature.outputs
    analysis = _Analysis(graph, inputs, outputs, scalers)
    analysis.run()
    if analysis.diagnostics.count and any(one.role is Role.GRADIENT for one in inputs):
        # The source line to report depends on the degree of an accumulated .grad: in such a loop it
        # is scaled.
        again = _Analysis(graph, inputs, outputs, scalers, kept_gradient=Degree.of(scalers[0]))
        again.run()
        if again.diagnostics.count <= analysis.diagnostics.count:
            analysis = again
    if analysis.diagnostics.count and any(op.name == LOOP for op in graph.ops):
        raise StepsNeeded
    return analysis


def _is_scale(spec: InputSpec) -> bool:
    return spec.role is Role.SCALER_STATE and spec.name.endswith(SCALE_SUFFIX)


class _Analysis:
    """One walk over the step, in program order: a value's degree is known before it is used.

    `kept_gradient` is the degree of each .grad from an earlier call, None to find it out.
    """

    def __init__(
        self,
        graph: StepGraph,
        inputs: Sequence[InputSpec],
        outputs: Sequence[OutputSpec],
        scalers: Sequence[str],
        *,
        kept_gradient: Degree | None = None,
    ) -> None:
        self.graph = graph
        self.inputs = inputs
        self.outputs = outputs
        self.kept_gradient = kept_gradient
        self.solver = Solver()
        self.degrees = degrees_of_constants(graph)
        self.diagnostics = Diagnostics(graph, inputs, scalers, self.solver)
        self._dropped = _dropped_gradients(graph, inputs, outputs)
        self._matters = _ops_reaching(
            graph, outputs, lambda spec: _is_state(spec) and spec.name not in self._dropped
        )
        self._matters_beyond_gradients = _ops_reaching(
            graph, outputs, lambda spec: _is_state(spec) and spec.role is not Role.GRADIENT
        )

    def run(self) -> None:
        for leaf, spec in zip(self.graph.inputs, self.inputs, strict=True):
            self.degrees[leaf] = self._of_input(spec)
        for op in self.graph.ops:
            for leaf, degree in zip(op.results, self._of_op(op), strict=True):
                self.degrees[leaf] = degree
        for leaf, output in zip(self.graph.outputs, self.outputs, strict=True):
            self._check_output(leaf, output)

    def by_name(self) -> dict[str, Any]:
        """Return the degree of every variable, by its name."""
        named: dict[str, Any] = {
            self.graph.values[leaf].expr.name: self._resolved(leaf)  # type: ignore[union-attr]
            for leaf in self.graph.inputs
        }
        for op in self.graph.ops:
            found = tuple(self._resolved(leaf) for leaf in op.results)
            named[op.variable.name] = found if isinstance(op.result, tuple) else found[0]
        return named

    def by_output(self) -> dict[str, ValueDegree]:
        """Return the degree of every output, by its name."""
        pairs = zip(self.graph.outputs, self.outputs, strict=True)
        return {spec.name: self._resolved(leaf) for leaf, spec in pairs}

    def _resolved(self, leaf: int) -> ValueDegree:
        degree = self.degrees[leaf]
        return self.solver.resolve(degree) if isinstance(degree, Degree) else degree

    def _of_input(self, spec: InputSpec) -> ValueDegree:
        if _is_scale(spec):
            return Degree.of(spec.name.removesuffix(SCALE_SUFFIX))
        if spec.role is Role.GRADIENT:
            # Other calls, of this step or another, computed it: its first use here determines the
            # degree.
            return self.kept_gradient or self.solver.new_unknown(spec.name)
        return ZERO

    def _of_op(self, op: Op) -> Sequence[ValueDegree]:
        if op.name == LOOP:
            given = [self.degrees[leaf] for leaf in op.reads]
            return degrees_of_loop(loop_of(op.call), given, self.solver, self.diagnostics)
        count = len(op.results)
        bad = self._bad_operand(op)
        if bad is not None:
            indifferent = INDIFFERENT.get(op.name, ())
            return [ZERO if k in indifferent else bad for k in range(count)]
        rule = RULES.get(op.name)
        if rule is None:
            return [Unknown(f"{op.location}: {op.name} has no rule")] * count
        operands = operands_of(self.graph, op, self.degrees, self.solver)
        try:
            result = rule(operands)
        except CannotTell as error:
            return [Unknown(self.diagnostics.why_unknown(op, operands, error.position))] * count
        except DegreesDiffer as error:
            diagnostic = Diagnostic(Kind.DIFFER, op, error.positions, operands)
            return [self._report(op, diagnostic)] * count
        except NotScaled as error:
            diagnostic = Diagnostic(Kind.NOT_SCALED, op, (error.position,), operands)
            return [self._report(op, diagnostic)] * count
        self.diagnostics.note_assumptions(op, operands)
        return list(result) if isinstance(result, tuple) else [result]

    def _bad_operand(self, op: Op) -> ValueDegree | None:
        """Return WRONG, or the first unknown, among the operands; None when all are known."""
        read = [self.degrees[leaf] for leaf in op.reads]
        if Special.WRONG in read:
            return Special.WRONG
        return next((degree for degree in read if isinstance(degree, Unknown)), None)

    def _report(self, op: Op, diagnostic: Diagnostic) -> ValueDegree:
        """Report an error that the state depends on; a value that is only returned affects none."""
        kept = self.diagnostics.kept_gradient_of(diagnostic) if op.name == "relax.where" else None
        if kept is not None and op.position not in self._matters_beyond_gradients:
            # A skipped step selects the old .grad, still scaled, instead of the unscaled one.
            self.diagnostics.uncleared(kept)
            return Special.WRONG
        if op.position in self._matters:
            self.diagnostics.add(diagnostic)
            return Special.WRONG
        self.diagnostics.add_harmless(diagnostic)
        return Unknown(self.diagnostics.sentence(diagnostic))

    def _check_output(self, leaf: int, spec: OutputSpec) -> None:
        degree = self._resolved(leaf)
        is_free = not _is_state(spec) and spec.role is not Role.RESULT
        if is_free or degree is Special.WRONG or degree is Special.ANY:
            return
        if isinstance(degree, Unknown):
            self.diagnostics.unknown_output(spec, degree)
        elif spec.role is Role.RESULT:
            self.diagnostics.scaled_result(spec, degree)
        elif spec.updates is not None and spec.name not in self._dropped:
            expected = self._resolved(self.graph.inputs[spec.updates])
            assert isinstance(expected, Degree)
            if self.solver.equate(degree, expected):
                return
            if spec.role is Role.GRADIENT:
                self.diagnostics.uncleared(spec.name)
            else:
                self.diagnostics.wrong_state(leaf, spec, degree, expected)


def _is_state(spec: OutputSpec) -> bool:
    """Return whether a later call computes with an output: not a result, nor a scaler's log.

    The scale itself may become anything, as `update(new_scale)` makes it: it is the unit.
    """
    is_scale_or_log = spec.role is Role.SCALER_STATE and spec.dtype.startswith("float")
    return spec.role is not Role.RESULT and not is_scale_or_log


def _dropped_gradients(
    graph: StepGraph, inputs: Sequence[InputSpec], outputs: Sequence[OutputSpec]
) -> set[str]:
    """Return the names of each .grad that no later call reads: it is cleared before it is read.

    An example is the discriminator's .grad, which the generator's backward pass adds to after
    the discriminator's own optimizer step.
    """
    dropped = {spec.name for spec in outputs if spec.role is Role.GRADIENT}
    while True:
        kept = [_is_state(spec) and spec.name not in dropped for spec in outputs]
        read = {leaf for leaf, is_kept in zip(graph.outputs, kept, strict=True) if is_kept}
        for op in reversed(graph.ops):
            if read.intersection(op.results):
                read.update(op.reads)
        used = {s.name for leaf, s in zip(graph.inputs, inputs, strict=True) if leaf in read}
        if not dropped & used:
            return dropped
        dropped -= used


def _ops_reaching(
    graph: StepGraph, outputs: Sequence[OutputSpec], counts: Callable[[OutputSpec], bool]
) -> set[int]:
    """Return the positions of all ops that the state outputs depend on."""
    wanted = {leaf for leaf, spec in zip(graph.outputs, outputs, strict=True) if counts(spec)}
    found = set()
    for op in reversed(graph.ops):
        if wanted.intersection(op.results):
            found.add(op.position)
            wanted.update(op.reads)
    return found
