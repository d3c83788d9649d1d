# SPDX-License-Identifier: Apache-2.0
"""The traces of one capture: those of the step, and those that show what its numbers do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from amp_ir.capture.batch import Arguments
from amp_ir.capture.functional import make_functional
from amp_ir.capture.guards.followed_hypers import (
    OtherHypers,
    check_hypers_followed,
    computes_with_hypers,
    other_values,
)
from amp_ir.capture.guards.followed_numbers import (
    distance_to_others,
    is_followed,
    is_same_graph,
)
from amp_ir.capture.guards.gradient_flags import GradientFlags
from amp_ir.capture.guards.kept_values import (
    are_carried,
    are_read,
    shapes_are_asked,
    with_tensors_before,
)
from amp_ir.capture.guards.left_values import InitialValues, Left
from amp_ir.capture.guards.objects import GuardedObjects
from amp_ir.capture.guards.side_effects import SideEffects
from amp_ir.capture.hyper_parameters import HyperParameter
from amp_ir.capture.outside_tensors import lift_outside_tensors
from amp_ir.capture.state import State, WritesOutsideError
from amp_ir.capture.traced import Traced
from amp_ir.capture.tracing import StepTracer
from amp_ir.distributed.replicas import Ranks
from amp_ir.errors import CaptureError
from amp_ir.host.fake_tensors import fake_tensor_mode


@attrs.frozen
class Traces:
    """The traces that one capture needs until it is known what can be an input."""

    step: Callable[..., Any]
    arguments: Arguments
    state: State
    hypers: list[HyperParameter]
    ranks: Ranks | None = None

    def run(
        self, numbers: frozenset[str], *, symbolic: bool = True, others: int = 0
    ) -> tuple[StepTracer, Traced]:
        """Return a valid trace; the numbers are symbolic or plain, or `others`, so far away.

        A step that leaves values in its first call is traced as it is called then, and as later;
        its guards hold once the values have been left.

        Raises:
            CaptureError: the step has Python state, or cannot be traced.
        """
        how: dict[str, Any] = {"symbolic": symbolic, "others": others}
        tracer, traced = self._once(numbers, **how)
        if tracer.effects.tables.of_state:
            try:
                return self._settled(tracer, traced, numbers, **how)
            except CaptureError:
                # No tables that are made once: kept like all else that a step computes.
                how["finds_tables_of_state"] = False
                tracer, traced = self._once(numbers, **how)
        return self._settled(tracer, traced, numbers, **how)

    def _settled(
        self, tracer: StepTracer, traced: Traced, numbers: frozenset[str], **how: Any
    ) -> tuple[StepTracer, Traced]:
        """Return the trace of calls that find what a first one has left.

        Raises:
            CaptureError: that is another step, of which each call leaves something else.
        """
        effects = tracer.effects
        if effects.tables.found:
            self._check_tables(effects, numbers, **how)
        if effects.kept.unsure:
            return self._keeping(tracer, traced, numbers, **how)
        if not effects.left and not effects.tables.may_change:
            return tracer, traced
        if effects.tables.all:
            found = self._with_tables(tracer, traced, numbers, **how)
            if found is not None:
                return found
        if effects.tables.of_state:
            raise effects.tables.error_of_state()
        if not effects.left:
            return tracer, traced
        return self._with_left(tracer, traced, numbers, **how)

    def _with_left(
        self, tracer: StepTracer, traced: Traced, numbers: frozenset[str], **how: Any
    ) -> tuple[StepTracer, Traced]:
        """Return the trace that finds in place the plain values that the first one left.

        Raises:
            CaptureError: that is another step.
        """
        effects = tracer.effects
        with effects.again():
            try:
                other, second = self._once(numbers, **how)
            except CaptureError as error:
                # Without the tables that the step makes beside what it leaves, any may follow.
                raise effects.state_error() if effects.tables.all else error from None
        if other.effects.left or not is_same_graph(traced, tracer.tape, second, other.tape):
            if effects.leave_modes():
                return tracer, attrs.evolve(traced, stored=tuple(effects.stored))
            raise effects.state_error(other.effects)
        left = _initial_values(tracer, effects.left)
        if left is None:
            return tracer, traced
        return other, attrs.evolve(second, initial_values=left)

    def _keeping(
        self, tracer: StepTracer, traced: Traced, numbers: frozenset[str], **how: Any
    ) -> tuple[StepTracer, Traced]:
        """Return the trace that finds other values where a first one keeps some, and is the same.

        Raises:
            CaptureError: it is not: what a call keeps is the state of later ones.
        """
        effects = tracer.effects
        examples = [one.example() for one in effects.kept.unsure]
        in_place = [*effects.tables.all, *examples]
        with self._kept_state(), effects.again(in_place):
            try:
                other, second = self._once(numbers, **how)
            except (CaptureError, WritesOutsideError):
                raise effects.kept.error() from None
            first = attrs.evolve(traced, graph=effects.tables.found_in_place(traced.graph))
            is_same = is_same_graph(first, tracer.tape, second, other.tape)
        is_read = are_read(examples, second.graph, other.observer)
        if (
            is_same
            and not is_read
            and not other.effects.left
            and other.effects.kept.are_as(effects.kept)
        ):
            effects.tables.note_sources()
            read = frozenset(one.place.identity for one in effects.kept.unsure)
            left = _initial_values(tracer, [*effects.left, *in_place], read)
            if left is not None:
                any_shape = not shapes_are_asked(examples, other.observer)
                kept = second.kept_beside(traced.kept, any_shape=any_shape)
                return other, attrs.evolve(second, initial_values=left, kept=kept)
        if other.effects.left:
            raise effects.state_error(other.effects)
        if effects.left or effects.tables.all:
            raise effects.kept.error()
        if not are_carried(effects.kept.unsure, self.state, tracer.observer):
            raise effects.kept.error()
        if any(one.goes_on for one in effects.kept.unsure):
            self._check_detached(tracer, traced, numbers, **how)
        return tracer, traced.with_kept_inputs()

    def _check_detached(
        self, tracer: StepTracer, traced: Traced, numbers: frozenset[str], **how: Any
    ) -> None:
        """Check that a step takes no gradient of what it finds where it keeps tensors with a graph.

        Raises:
            CaptureError: it goes on into the graph of the call before.
        """
        effects = tracer.effects
        twins = [one.twin() for one in effects.kept.unsure if one.goes_on]
        with self._kept_state(), effects.again(twins):
            try:
                other, second = self._once(numbers, **how)
            except (CaptureError, WritesOutsideError):
                raise effects.kept.error() from None
            second = attrs.evolve(second, graph=with_tensors_before(second.graph, twins))
            is_same = is_same_graph(traced, tracer.tape, second, other.tape)
        if not is_same:
            raise effects.kept.error()

    def _check_tables(self, effects: SideEffects, numbers: frozenset[str], **how: Any) -> None:
        """Check that the step leaves the tables alone that it made, once they are there."""
        with self._kept_state(), effects.again(effects.tables.all):
            try:
                other, _ = self._once(numbers, **how)
            except WritesOutsideError:
                raise effects.tables.error() from None
        if {one.key for one in other.effects.left} - {one.key for one in effects.left}:
            raise effects.tables.error()
        effects.tables.refuse_changed(other.effects.tables)

    def _with_tables(
        self, tracer: StepTracer, traced: Traced, numbers: frozenset[str], **how: Any
    ) -> tuple[StepTracer, Traced] | None:
        """Return the trace that finds in place all that the first one left, its tables too.

        None where that is another step.
        """
        effects = tracer.effects
        with effects.again(effects.tables.all):
            try:
                other, second = self._once(numbers, **how)
            except WritesOutsideError:
                raise effects.tables.error() from None
            except CaptureError:
                return None
        first = attrs.evolve(traced, graph=effects.tables.found_in_place(traced.graph))
        if other.effects.left or not is_same_graph(first, tracer.tape, second, other.tape):
            return None
        effects.tables.note_sources()
        left = _initial_values(tracer, [*effects.left, *effects.tables.all])
        return None if left is None else (other, attrs.evolve(second, initial_values=left))

    def _once(self, numbers: frozenset[str], **how: Any) -> tuple[StepTracer, Traced]:
        mode = fake_tensor_mode(allow_non_fake_inputs=True)
        tracer = StepTracer(
            self.step,
            self.arguments,
            self.state,
            self.hypers,
            mode,
            numbers,
            ranks=self.ranks,
            **how,
        )
        return tracer, tracer.trace()

    def equal_flags(self, tracer: StepTracer, traced: Traced) -> GradientFlags | None:
        """Return the flags that the step changes, if it is the same where it begins with them.

        As a step is that sets `requires_grad` before it computes.
        """
        if traced.flags is None:
            return None
        numbers = frozenset(number.name for number in tracer.numbers.found)
        with self._kept_state(), traced.initial_values.held(), traced.flags.left():
            try:
                other, second = self._once(numbers)
            except CaptureError:
                return None  # the next call, which begins so, will report it
        is_same = is_same_graph(traced, tracer.tape, second, other.tape)
        return traced.flags if is_same else None

    def followable(self, numbers: frozenset[str]) -> frozenset[str]:
        """Return the numbers that the step uses only in operations that can be followed."""
        if not numbers or self._agree(numbers):
            return numbers
        alone = [name for name in sorted(numbers) if self._agree(frozenset({name}))]
        return frozenset(alone) if self._agree(frozenset(alone)) else frozenset()

    def check_hypers(
        self, tracer: StepTracer, traced: Traced, numbers: frozenset[str]
    ) -> Callable[[torch.fx.GraphModule], None]:
        """Check that a trace follows its hyper-parameters; return the functional graph's check.

        PyTorch's own optimizers do, and so does a step that leaves them to those. Of other code
        two traces with other values show what computes with a hyper-parameter outside of it.

        Raises:
            CaptureError: a value would stay as it was at the capture; names the first such place.
        """
        if not computes_with_hypers(tracer.observer, self.state.optimizers):
            return lambda graph: None
        others = other_values(tracer.tape, len(self.hypers))
        with self._kept_state(), traced.initial_values.held():
            plain, of_plain = self._once(numbers, other_hypers=OtherHypers(others, symbolic=False))
            check_hypers_followed(traced, tracer.tape, others, of_plain, plain.tape)
            second, functional = self._functional(
                *self._once(numbers, other_hypers=OtherHypers(others, symbolic=True))
            )

        def check(graph: torch.fx.GraphModule) -> None:
            own = attrs.evolve(traced, graph=graph)
            check_hypers_followed(own, tracer.tape, others, functional, second.tape)

        return check

    @contextlib.contextmanager
    def _kept_state(self) -> Iterator[None]:
        """Put back the fakes and the outside tensors that a valid trace has found."""
        fakes = [(entry, entry.fake) for entry in self.state.tensors]
        outside = list(self.state.outside)
        self.state.outside.clear()
        try:
            yield
        finally:
            self.state.outside[:] = outside
            for entry, fake in fakes:
                entry.fake = fake

    def _agree(self, numbers: frozenset[str]) -> bool:
        if not numbers:
            return True
        try:
            first = self.run(numbers)
            if first[0].effects.leaves_followed:
                return False  # a compiled step leaves the value that a capture saw
            others = distance_to_others(first[0].tape, first[0].numbers.found)
            plain = self.run(numbers, symbolic=False, others=others)
            if not self._is_same(first, plain, others):
                return False
            second = self.run(numbers, others=others)
            return self._is_same(self._functional(*first), self._functional(*second), others)
        except CaptureError:
            return False  # if the numbers are not the cause, the capture reports the error

    @staticmethod
    def _is_same(
        symbolic: tuple[StepTracer, Traced], other: tuple[StepTracer, Traced], others: int
    ) -> bool:
        """Return whether the trace of symbols equals the other one with their values inserted."""
        (one, traced), (two, second) = symbolic, other
        found = one.numbers.found
        if [number.name for number in found] != [number.name for number in two.numbers.found]:
            return False
        return is_followed(traced, one.tape, found, second, two.tape, others)

    def _functional(self, tracer: StepTracer, traced: Traced) -> tuple[StepTracer, Traced]:
        """Return the trace with its functional graph; the state is as before."""
        outside = list(self.state.outside)
        try:
            tensors = tracer.observer.objects.tensors
            traced = lift_outside_tensors(traced, self.state, tensors, tracer.mode)
            graph = make_functional(traced.graph, traced.inputs, tracer.tape, tracer.mode)
        finally:
            self.state.outside[:] = outside
        return tracer, attrs.evolve(traced, graph=graph)


def _initial_values(
    tracer: StepTracer, left: Sequence[Left], read: frozenset[tuple[int, Any]] = frozenset()
) -> InitialValues | None:
    """Return what the first call leaves, with the guards of the trace that leaves it.

    `read` are the places that others guard.
    """
    followed = frozenset(number.name for number in tracer.numbers.found)
    guards = GuardedObjects(tracer.observer, followed, frozenset(), read)
    return InitialValues.of(left, guards.changes)
