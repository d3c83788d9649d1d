# SPDX-License-Identifier: Apache-2.0
"""What a traced step keeps, as results of its graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from amp_ir.capture.alias_sets import shared_memory
from amp_ir.capture.batch import Results
from amp_ir.capture.guards.kept_results import KeptResult
from amp_ir.capture.guards.kept_values import NUMBERS, KeptValue
from amp_ir.capture.later_number import LaterNumber
from amp_ir.capture.state import State
from amp_ir.capture.traced_node import traced_node
from amp_ir.ir.location import Location
from amp_ir.ir.step_module import Role

KEEP_COPY = "Keep a copy of it (.clone()), or read it there after the call"


def results_of(
    leaves: list[Any], spec: Any, position: Mapping[int, int], own: Mapping[int, torch.Tensor]
) -> Results:
    """Return the structure of leaves whose tensors and numbers have these positions, by id.

    `own` are the user's tensors by the ids of those that stand for them in the trace.
    """
    numbers = frozenset(k for k, leaf in enumerate(leaves) if isinstance(leaf, NUMBERS))
    integers = frozenset(k for k in numbers if getattr(leaves[k], "is_integer_valued", False))
    leaves = [leaf.tensor if isinstance(leaf, LaterNumber) else leaf for leaf in leaves]
    leaves = [own.get(id(leaf), leaf) for leaf in leaves]
    places = tuple(position.get(id(leaf)) for leaf in leaves)
    pairs = zip(leaves, places, strict=True)
    constants = tuple(leaf if place is None else None for leaf, place in pairs)
    return Results(spec, places, constants, numbers, integers)


class KeptOutputs:
    """What one traced step computes and keeps, with the tensors that are there already.

    `values` are those of the state's tensors at the end of the step, `batch` the fakes of its
    arguments.
    """

    def __init__(
        self,
        kept: Sequence[KeptValue],
        state: State,
        values: Sequence[torch.Tensor],
        batch: Sequence[torch.Tensor],
    ) -> None:
        self._kept = [one for one in kept if one.is_computed]
        self._state = state
        self._values = values
        self._batch = {id(one): k for k, one in enumerate(batch)}
        self._own = {
            id(entry.fake): entry.tensor
            for entry, value in zip(state.tensors, values, strict=True)
            if entry.role in (Role.PARAMETER, Role.BUFFER) and value is entry.fake
        }

    def leaves(self) -> list[Any]:
        """Return the tensors and numbers that the step has to compute."""
        every = (leaf for one in self._kept for leaf in one.leaves)
        return [leaf for leaf in every if id(leaf) not in self._own and id(leaf) not in self._batch]

    def results(self, position: Mapping[int, int]) -> tuple[KeptResult, ...]:
        """Return what each call keeps, for the positions of its results, by id."""
        behind = {key: len(self._batch) + place for key, place in position.items()}
        of = {**behind, **self._batch}
        return tuple(
            KeptResult(
                one.place,
                results_of(one.leaves, one.spec, of, self._own),
                one.in_words(),
                is_read=one.unsure is not None,
            )
            for one in self._kept
        )

    def refused(self) -> Iterator[tuple[str, Location]]:
        """Return what cannot be kept, each in words: what later steps would write to."""
        names = self._nodes_of_state() if self._kept else {}
        for one in self._kept:
            for tensor in one.tensors:
                nodes = () if id(tensor) in self._own else _nodes_of_memory(tensor)
                sharing = next((names[node] for node in nodes if node in names), "")
                if sharing:
                    yield f"keeps a view of {sharing} in {one.place.name()}", one.where

    def _nodes_of_state(self) -> dict[torch.fx.Node, str]:
        """Return the nodes of the state before and after the step, and of gradients, by name."""
        state = self._state
        tensors = [(entry.fake, entry.name) for entry in state.tensors]
        tensors += zip(self._values, (entry.name for entry in state.tensors), strict=True)
        tensors += [
            (entry.fake.grad, f"{entry.name}.grad")
            for entry in state.parameters
            if entry.fake.grad is not None
        ]
        return {node: name for tensor, name in tensors for node in _nodes_of_memory(tensor)}


def _nodes_of_memory(tensor: torch.Tensor) -> Iterator[torch.fx.Node]:
    """Return the node of a tensor of the trace, and those in whose memory it may lie."""
    node = traced_node(tensor)
    waiting = [] if node is None else [node]
    seen: set[torch.fx.Node] = set()
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen.add(one)
            yield one
            waiting += shared_memory(one)
