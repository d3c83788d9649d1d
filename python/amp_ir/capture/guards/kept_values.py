# SPDX-License-Identifier: Apache-2.0
"""Tensors that a traced step keeps in the user's objects (`self.fake = self.generator(x)`).

What a place holds is one more result of the step, which each call puts there. It has no `grad_fn`,
as what a compiled step returns has none. A tensor of the batch, a parameter or a buffer is kept
itself, not a copy.

Where the step may read the place before it writes it, a second trace finds another value there. If
it is the same, nothing depends on what was kept. If not, each call reads what the one before has
kept (`self.hidden`), as one more input.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor

from amp_ir.capture.alias_sets import shared_memory
from amp_ir.capture.batch import Results, unusable_result
from amp_ir.capture.containers import flatten
from amp_ir.capture.guards.kept_results import KeptResult
from amp_ir.capture.guards.left_values import Left
from amp_ir.capture.guards.observer import Observer
from amp_ir.capture.guards.places import Place, is_plain
from amp_ir.capture.guards.read_places import readable, tensors_in
from amp_ir.capture.guards.unread_number import UnreadNumber
from amp_ir.capture.later_number import LaterNumber
from amp_ir.capture.state import State
from amp_ir.capture.symbolic_float import SymbolicFloat
from amp_ir.capture.traced_node import traced_node
from amp_ir.host.held_values import each_held
from amp_ir.ir.location import Location
from amp_ir.ir.step_module import Role

KEEP_COPY = "Keep a copy of it (.clone()), or read it there after the call"
_NUMBERS = (SymbolicFloat, LaterNumber)
_UPDATE = (
    "Make it a tensor before the first call, such as a buffer, and update it in place: "
    "kept.copy_(value)"
)
_DETACH = "Keep it detached (h.detach()): its graph is that of the call before"


@attrs.frozen(eq=False)
class KeptValue:
    """A value of the trace that a step keeps: its place, and its leaves as of `flatten`.

    Calls put values in their `order`, which is the same in every process. `made` are its containers
    which the step seems to have made. `unsure` is the diagnostic of a step that reads what the call
    before it has kept; None where it cannot.
    """

    place: Place
    order: tuple[Any, ...]
    leaves: list[Any]
    spec: Any
    where: Location
    made: tuple[Any, ...]
    unsure: tuple[str, Location, str] | None

    @classmethod
    def of(
        cls,
        place: Place,
        value: Any,
        order: tuple[Any, ...],
        known: Container[int],
        unfilled: Container[int],
        where: Location,
    ) -> KeptValue | None:
        """Return the value; None where a call cannot make it anew.

        `known` are the ids of what the step has met, but for `unfilled` containers of its own.
        """
        made = []
        try:
            for one in each_held(value, _is_leaf):
                if id(one) in known and not _is_leaf(one):
                    if id(one) not in unfilled:
                        return None
                    made.append(one)
        except OverflowError:
            return None
        leaves, spec = flatten(value)
        if not all(isinstance(one, _NUMBERS) or not unusable_result(one) for one in leaves):
            return None
        unsure = None
        if place.is_loaded or made:
            what = f"keeps {_first_in_words(leaves)} in {place.name()}, which the next call reads"
            fakes = (one for one in leaves if isinstance(one, FakeTensor))
            unsure = what, where, _DETACH if any(one.requires_grad for one in fakes) else _UPDATE
        return cls(place, order, leaves, spec, where, tuple(made), unsure)

    @property
    def key(self) -> tuple[int, Any]:
        """Return what is equal for the same place in another trace."""
        return id(self.place.holder), self.place.key

    @property
    def tensors(self) -> list[FakeTensor]:
        """The tensors of the trace that it holds, among them those of numbers."""
        held = [one.tensor if isinstance(one, LaterNumber) else one for one in self.leaves]
        return [one for one in held if isinstance(one, FakeTensor)]

    @property
    def is_computed(self) -> bool:
        """Whether it holds what the step computes, and not constants alone."""
        return any(isinstance(one, (FakeTensor, *_NUMBERS)) for one in self.leaves)

    @property
    def has_graph(self) -> bool:
        """Whether PyTorch keeps a graph with it, into which the next call could go on."""
        return any(one.requires_grad for one in self.tensors)

    @property
    def goes_on(self) -> bool:
        """Whether the step finds tensors where it keeps some with a graph."""
        return self.has_graph and bool(tensors_in(self.place.before))

    def twin(self) -> Left:
        """Return what was there before, with tensors that need a gradient."""
        leaves, spec = flatten(self.place.before)
        leaves = [
            torch.zeros_like(one).requires_grad_(one.is_floating_point())
            if isinstance(one, torch.Tensor)
            else one
            for one in leaves
        ]
        said = self.unsure or ("", self.where, "")
        return Left(self.place, pytree.tree_unflatten(leaves, spec), self.key, said)

    def in_words(self) -> str:
        """Return what it is, equal for tensors of equal shapes."""
        return ", ".join(map(_in_words, self.leaves))

    def example(self) -> Left:
        """Return a value of the same kind that no step computes, for its place."""
        leaves = [_example(one) for one in self.leaves]
        value = pytree.tree_unflatten(leaves, self.spec)
        return Left(self.place, value, self.key, self.unsure or ("", self.where, ""))


def are_carried(kept: Sequence[KeptValue], state: State, observer: Observer) -> bool:
    """Return whether a program can read, at each call, what the one before has kept there."""
    are_tensors = (isinstance(leaf, FakeTensor) for one in kept for leaf in one.leaves)
    if any(one.made for one in kept) or not all(are_tensors):
        return False
    return len(readable([one.place for one in kept], state, observer)) == len(kept)


def are_read(examples: Sequence[Left], module: torch.fx.GraphModule, observer: Observer) -> bool:
    """Return whether a trace that found examples computes with one, or reads its values."""
    leaves = [leaf for one in examples for leaf in flatten(one.value)[0]]
    if any(type(leaf) is UnreadNumber and leaf.was_read for leaf in leaves):
        return True
    own = {id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
    constants = (node for node in module.graph.nodes if node.op == "get_attr")
    read = {id(getattr(module, str(node.target))) for node in constants}
    return bool(own & (read | observer.read_values.keys()))


def shapes_are_asked(examples: Sequence[Left], observer: Observer) -> bool:
    """Return whether code that a trace ran may ask examples for their shapes."""
    own = {id(tensor) for one in examples for tensor in tensors_in(one.value)}
    return observer.readings.are_of(own)


def with_tensors_before(module: torch.fx.GraphModule, examples: Sequence[Left]) -> Any:
    """Return a graph that found examples, with what was there before in place of these."""
    before = {
        id(example): tensor
        for one in examples
        if isinstance(one.place, Place)
        for example, tensor in zip(
            tensors_in(one.value), tensors_in(one.place.before), strict=False
        )
    }
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    made = torch.fx.GraphModule(module, graph)
    for node in graph.nodes:
        if node.op == "get_attr":
            held = getattr(module, str(node.target))
            setattr(made, str(node.target), before.get(id(held), held))
    return made


def results_of(
    leaves: list[Any], spec: Any, position: Mapping[int, int], own: Mapping[int, torch.Tensor]
) -> Results:
    """Return the structure of leaves whose tensors and numbers have these positions, by id.

    `own` are the user's tensors by the ids of those that stand for them in the trace.
    """
    numbers = frozenset(k for k, leaf in enumerate(leaves) if isinstance(leaf, _NUMBERS))
    integers = frozenset(k for k in numbers if getattr(leaves[k], "is_integer_valued", False))
    leaves = [leaf.tensor if isinstance(leaf, LaterNumber) else leaf for leaf in leaves]
    leaves = [own.get(id(leaf), leaf) for leaf in leaves]
    places = tuple(position.get(id(leaf)) for leaf in leaves)
    pairs = zip(leaves, places, strict=True)
    constants = tuple(leaf if place is None else None for leaf, place in pairs)
    return Results(spec, places, constants, numbers, integers)


class KeptByStep:
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


def _is_leaf(value: Any) -> bool:
    kinds = (torch.Tensor, torch.nn.Module, type, *_NUMBERS)
    return is_plain(value) or isinstance(value, kinds)


def _example(leaf: Any) -> Any:
    if isinstance(leaf, _NUMBERS):
        return UnreadNumber()
    if not isinstance(leaf, torch.Tensor):
        return leaf
    made = torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
    return made.requires_grad_(leaf.requires_grad)


def _first_in_words(leaves: Sequence[Any]) -> str:
    computed = (one for one in leaves if isinstance(one, (FakeTensor, *_NUMBERS)))
    return next(map(_in_words, computed), "a tensor")


def _in_words(leaf: Any) -> str:
    if isinstance(leaf, _NUMBERS):
        return "a number"
    return (
        f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else repr(leaf)
    )
