# SPDX-License-Identifier: Apache-2.0
"""The nodes that a call becomes in the second pass of a capture, to be copied for equal calls.

Templates refer to no graph: tensors are places among the arguments and the nodes before. So later
captures of the process use them too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_aggregate

from amp_ir.capture.outcome_store import OutcomeStore
from amp_ir.capture.repeated_ops import BY_NUMBER, Kind, fake_of_kind, has_views, kind_of

Key = tuple[Any, ...]


@attrs.frozen
class Place:
    """Where a template has a tensor: an argument of the call, or a node before."""

    index: int


class _Number:
    """Where a template has the number of a call in `BY_NUMBER`."""


_NUMBER = _Number()


@attrs.frozen(eq=False)
class _Kind:
    """The kind of a fake tensor, in its place among a node's results."""

    kind: Kind


@attrs.frozen(eq=False)
class TemplateNode:
    """A node of a template; `val`: its fake tensors, or in `TEMPLATES` their kinds."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    val: Any


@attrs.frozen(eq=False)
class Template:
    """The nodes of a call, and the places of its results, one or a sequence."""

    nodes: tuple[TemplateNode, ...]
    results: Any

    def copied(
        self, graph: torch.fx.Graph, tensors: Sequence[torch.fx.Node], number: float | None
    ) -> Any:
        """Append the nodes of a call with these arguments, and return those of its results."""
        placed = list(tensors)

        def filled(value: Any) -> Any:
            if type(value) is Place:
                return placed[value.index]
            return number if value is _NUMBER else value

        for node in self.nodes:
            args = map_aggregate(node.args, filled)
            kwargs = map_aggregate(node.kwargs, filled)
            copy = graph.create_node("call_function", node.target, args, kwargs, node.name)
            copy.meta["val"] = node.val
            placed.append(copy)
        return map_aggregate(self.results, filled)

    def with_vals(self, function: Any) -> Template:
        """Return the template with other descriptions of results."""
        nodes = [attrs.evolve(one, val=map_aggregate(one.val, function)) for one in self.nodes]
        return Template(tuple(nodes), self.results)


# Of all captures of the process, with kinds in place of fake tensors.
TEMPLATES: OutcomeStore[Template] = OutcomeStore()


class Templates:
    """The templates of one capture, whose fake tensors have this mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Key, Template] = {}

    def get(self, key: Key) -> Template | None:
        """Return the template of equal calls, of this capture or an earlier one."""
        known = self._known.get(key)
        if known is None and (found := TEMPLATES.get(key)) is not None:
            with torch._C._DisableFuncTorch(), torch._C._DisableTorchDispatch():
                known = self._known[key] = found.with_vals(self._fake)
        return known

    def learn(self, key: Key, template: Template) -> None:
        """Keep a template for equal calls."""
        self._known[key] = template
        # Where a view of a written tensor is traced, its node comes when it is read, not before:
        # nodes are to have one order, whatever was captured before, on all ranks.
        if not has_views(key[0]) and not _has_number(key):
            TEMPLATES.put(key, template.with_vals(_kind))

    def _fake(self, value: Any) -> Any:
        return fake_of_kind(self._mode, value.kind, None) if type(value) is _Kind else value


def _kind(value: Any) -> Any:
    return _Kind(kind_of(value, has_views=True)) if isinstance(value, FakeTensor) else value


def template_of(
    nodes: Sequence[torch.fx.Node],
    places: Mapping[torch.fx.Node, Place],
    results: Any,
    number: float | None,
) -> Template | None:
    """Return the template of the nodes of a call; None where another number changes more of them.

    Requires: a place for each node, and for all that they read.
    """
    if number is not None and not _is_by_number(nodes, number):
        return None

    def in_template(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return places[value]
        return _NUMBER if number is not None and type(value) is float else value

    copies = tuple(
        TemplateNode(
            node.target,
            map_aggregate(node.args, in_template),
            map_aggregate(node.kwargs, in_template),
            node.name,
            node.meta["val"],
        )
        for node in nodes
    )
    return Template(copies, map_aggregate(results, in_template))


def number_of(n: torch.fx.Node) -> float | None:
    """Return the number of a call whose nodes are the same for each; None where there is none.

    A decomposition leaves out a factor of 1, has two forms of lerp, for weights below a half and
    others, and one of `alpha` where it is followed. NaN is not equal to itself. Of 0.5 the nodes
    of a lerp do not show where they have the weight and where 1 - weight, which is 0.5 too.
    """
    if n.target not in BY_NUMBER or "alpha" in n.kwargs:
        return None
    for value in (*n.args, *n.kwargs.values()):
        if type(value) is float and value not in (0.0, 0.5, 1.0) and value == value:
            return value
    return None


def key_of_number(number: float) -> Key:
    """Return what a call's key has in place of its number."""
    return ("number", abs(number) < 0.5)


def _is_by_number(nodes: Sequence[torch.fx.Node], number: float) -> bool:
    """Return whether nodes contain the number, and none that may be computed from it."""
    found: list[float] = []
    for node in nodes:
        map_aggregate(
            (node.args, node.kwargs),
            lambda value: found.append(value) if isinstance(value, float) else None,
        )
    return bool(found) and all(type(one) is float and one == number for one in found)


def _has_number(key: Any) -> bool:
    """Return whether a key contains a number that a capture may follow."""
    return isinstance(key, tuple) and (key[:1] == (float,) or any(map(_has_number, key)))
