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

from collections.abc import Container, Sequence
from typing import Any

import attrs
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor

from amp_ir.capture.batch import unusable_result
from amp_ir.capture.containers import flatten
from amp_ir.capture.diagnostics import Diagnostics
from amp_ir.capture.guards.left_values import Left, holds_result_number
from amp_ir.capture.guards.observed_objects import ObservedObjects
from amp_ir.capture.guards.observer import Observer
from amp_ir.capture.guards.places import (
    ABSENT,
    Contents,
    Place,
    is_plain,
    line_of,
    location_at,
)
from amp_ir.capture.guards.read_places import readable, tensors_in
from amp_ir.capture.guards.traced_values import begins_anew, holds_result
from amp_ir.capture.guards.unread_number import UnreadNumber
from amp_ir.capture.later_number import LaterNumber
from amp_ir.capture.state import State
from amp_ir.capture.symbolic_float import SymbolicFloat
from amp_ir.errors import CaptureError
from amp_ir.host.held_values import each_held
from amp_ir.ir.location import Location

NUMBERS = (SymbolicFloat, LaterNumber)
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
        if not all(isinstance(one, NUMBERS) or not unusable_result(one) for one in leaves):
            return None
        unsure = None
        if place.is_loaded or made:
            what = f"keeps {_first_in_words(leaves)} in {place.name()}, which the next call reads"
            fakes = (one for one in leaves if isinstance(one, FakeTensor))
            unsure = what, where, _DETACH if any(one.requires_grad for one in fakes) else _UPDATE
        return cls(place, order, leaves, spec, where, tuple(made), unsure)

    @property
    def tensors(self) -> list[FakeTensor]:
        """The tensors of the trace that it holds, among them those of numbers."""
        held = [one.tensor if isinstance(one, LaterNumber) else one for one in self.leaves]
        return [one for one in held if isinstance(one, FakeTensor)]

    @property
    def is_computed(self) -> bool:
        """Whether it holds what the step computes, and not constants alone."""
        return any(isinstance(one, (FakeTensor, *NUMBERS)) for one in self.leaves)

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
        return self._left(pytree.tree_unflatten(leaves, spec))

    def in_words(self) -> str:
        """Return what it is, equal for tensors of equal shapes."""
        return ", ".join(map(_in_words, self.leaves))

    def example(self) -> Left:
        """Return a value of the same kind that no step computes, for its place."""
        leaves = [_example(one) for one in self.leaves]
        return self._left(pytree.tree_unflatten(leaves, self.spec))

    def _left(self, value: Any) -> Left:
        said = self.unsure or ("", self.where, "")
        return Left(self.place, value, self.place.identity, said)


class KeptValues:
    """What one traced step keeps, of the objects that it was seen to reach."""

    def __init__(self, objects: ObservedObjects) -> None:
        self.all: list[KeptValue] = []
        self._objects = objects

    def keep(self, place: Place, now: Any) -> bool:
        """Make what a place holds a result of the step; return whether it is one."""
        is_computed = holds_result(now) or holds_result_number(now, self._objects.contents)
        if not (is_computed or begins_anew(now, place.before)):
            return False
        kept = self._kept_value(place, now)
        self.all += [] if kept is None else [kept]
        return kept is not None

    def keep_entries(self, contents: Contents, changed: Sequence[tuple[Any, Any, Any]]) -> bool:
        """Make all entries that changed results of the step, if one is; return whether they are."""
        shared = self._objects.contents
        if not any(
            holds_result(now) or holds_result_number(now, shared) or begins_anew(now, before)
            for _, now, before in changed
        ):
            return False
        is_dict = isinstance(contents.target, dict)
        kept = []
        for key, now, before in changed:
            if now is ABSENT or not (is_dict or before is not ABSENT):
                return False
            one = self._kept_value(contents.entry(key, before), now)
            if one is None:
                return False
            kept.append(one)
        self.all += kept
        return True

    def _kept_value(self, place: Place, now: Any) -> KeptValue | None:
        objects = self._objects
        filled = (one.target for one in objects.contents.values() if not one.before)
        line = line_of(place, objects.contents)
        contents = objects.contents.get(id(place.holder))
        if contents is None:
            order = *line, place.name(), 0
        else:  # in the order of the container, for that of a dictionary's keys
            is_dict = isinstance(contents.target, dict)
            position = list(contents.target).index(place.key) if is_dict else place.key
            order = *line, contents.name(), position
        return KeptValue.of(
            place, now, order, objects.known, set(map(id, filled)), location_at(line)
        )

    def holds(self, container: object) -> bool:
        """Return whether a container is one that the step has made for what it keeps."""
        return any(one is container for each in self.all for one in each.made)

    def sort(self) -> None:
        """Put values in their order: names come from sets, whose order each process has its own."""
        self.all.sort(key=lambda one: one.order)

    @property
    def unsure(self) -> list[KeptValue]:
        """What it keeps where it may read what the call before has kept."""
        return [one for one in self.all if one.unsure is not None]

    def are_as(self, first: KeptValues) -> bool:
        """Return whether a trace that found what another kept keeps that again, made anew."""
        mine, others = (
            [one.place.identity for one in each.unsure if one.is_computed] for each in (self, first)
        )
        made = {id(one) for each in first.all for one in each.made}
        is_anew = not any(id(one) in made for each in self.all for one in each.made)
        return mine == others and is_anew

    def error(self) -> CaptureError:
        """Return the error about what the step keeps and reads."""
        diagnostics = Diagnostics()
        for one in self.unsure:
            if one.unsure is not None and one.is_computed:
                diagnostics.add(*one.unsure)
        return diagnostics.error()


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


def _is_leaf(value: Any) -> bool:
    kinds = (torch.Tensor, torch.nn.Module, type, *NUMBERS)
    return is_plain(value) or isinstance(value, kinds)


def _example(leaf: Any) -> Any:
    if isinstance(leaf, NUMBERS):
        return UnreadNumber()
    if not isinstance(leaf, torch.Tensor):
        return leaf
    made = torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
    return made.requires_grad_(leaf.requires_grad)


def _first_in_words(leaves: Sequence[Any]) -> str:
    computed = (one for one in leaves if isinstance(one, (FakeTensor, *NUMBERS)))
    return next(map(_in_words, computed), "a tensor")


def _in_words(leaf: Any) -> str:
    if isinstance(leaf, NUMBERS):
        return "a number"
    return (
        f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else repr(leaf)
    )
