# SPDX-License-Identifier: Apache-2.0
"""The result of running a step on fake tensors."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from amp_ir.capture.argument_changes import ArgumentChanges
from amp_ir.capture.batch import Results
from amp_ir.capture.guards.gradient_flags import GradientFlags
from amp_ir.capture.guards.kept_results import KeptResult
from amp_ir.capture.guards.left_values import InitialValues, Left, StoredValue, in_full
from amp_ir.capture.guards.places import Place
from amp_ir.capture.guards.read_places import ReadPlace
from amp_ir.capture.guards.state_reads import StateReads
from amp_ir.capture.state import StateTensor
from amp_ir.capture.symbolic_float import SymbolicFloat
from amp_ir.ir.location import Location


@attrs.frozen(eq=False)
class Created:
    """A tensor of optimizer state that the step itself creates."""

    optimizer: int
    parameter: torch.Tensor
    key: str
    value: torch.Tensor


@attrs.frozen(eq=False)
class Traced:
    """The result of one run of the step.

    `graph` takes `inputs` (the fakes of the state, then of the batch) and returns, in order:
    `result_count` results (with those that it keeps, and of checks that raise at their end, which
    nobody reads), the new values of the state tensors, the gradients of the parameters `gradients`,
    which have one at the end, the values of `created`, and `read_count` tensors f64[] that the step
    read as Python floats.
    `symbols` are the results that are Python floats, `observed` the ids of the parameters whose
    gradient before the step affects it, `touched` those whose gradient it read, set or cleared,
    `stepped` the optimizers whose `step` ran, and `changes` what the step did to the containers
    among its arguments.
    `sends_buffers` is that flag of each replica as the step leaves it, and `flags` are parameters
    whose `requires_grad` it changes. `gives_gradients` says that
    a result requires a gradient, and `has_differentiated` that the step computed gradients. At
    `shown_at` the step turned tensors to text. `assigns_parts` says that it assigned views to the
    data of tensors. `initial_values` is what its first call leaves in
    the user's objects, `stored` what each call does, and `kept` those of its results.
    `read_places` are places whose tensors it reads at each call, whichever they are.
    """

    graph: torch.fx.GraphModule
    inputs: list[torch.Tensor]
    results: Results
    symbols: list[SymbolicFloat]
    result_count: int
    gradients: list[StateTensor]
    created: list[Created]
    read_count: int
    observed: set[int]
    touched: set[int]
    stepped: list[torch.optim.Optimizer]
    gives_gradients: bool
    has_differentiated: bool
    shown_at: tuple[Location, ...]
    assigns_parts: bool
    state_reads: StateReads
    changes: ArgumentChanges = ArgumentChanges()
    initial_values: InitialValues = InitialValues()
    stored: tuple[StoredValue, ...] = ()
    kept: tuple[KeptResult, ...] = ()
    read_places: tuple[ReadPlace, ...] = ()
    sends_buffers: tuple[bool, ...] = ()
    flags: GradientFlags | None = None

    def with_kept_inputs(self) -> Traced:
        """Return the trace that reads, at each call, what it keeps where it found tensors.

        Where it found others, as None, it is a step of the first call alone.
        """
        read = tuple(ReadPlace(one.place) for one in self.kept if one.is_read and one.held_tensors)
        kept = (attrs.evolve(one, is_read=one.is_read and one.held_tensors) for one in self.kept)
        return attrs.evolve(self, kept=tuple(kept), read_places=read)

    def with_inputs(self, places: Sequence[Place]) -> Traced:
        """Return the trace that reads the tensors of some places at each call."""
        known = {one.place.identity for one in self.kept}
        known |= {one.place.identity for one in self.read_places}
        # What the first call leaves is not there before it.
        known |= {one.key for one in self.initial_values.left}
        more = (
            ReadPlace(one) for one in places if not {one.identity, (id(one.holder), None)} & known
        )
        return attrs.evolve(self, read_places=(*self.read_places, *more))

    def kept_beside(
        self, first: Sequence[KeptResult], *, any_shape: bool
    ) -> tuple[KeptResult, ...]:
        """Return what this trace keeps that found examples of what the `first` one has kept."""
        before = {one.place.identity: one.place.before for one in first}
        return tuple(
            attrs.evolve(
                one, accepted=(one.place.before, before[one.place.identity]), any_shape=any_shape
            )
            if one.is_read
            else one
            for one in self.kept
        )

    def left_by_name(self) -> dict[str, str]:
        """Return the values that the step leaves in the user's objects, as text, by their names."""
        left: list[Left | StoredValue] = [*self.initial_values.left, *self.stored]
        kept = {one.place.name(): one.in_words for one in self.kept}
        named = ((one.place.name(), one.value) for one in left)
        return {**{name: in_full(value) for name, value in named if name not in kept}, **kept}
