# SPDX-License-Identifier: Apache-2.0
"""Alias sets: which tensors of a traced graph may share memory."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch

from amp_ir.capture.repeated_ops import DESCRIBED

aten = torch.ops.aten
STRIDED = frozenset({aten.as_strided.default, aten.as_strided_.default})


class AliasSets:
    """The tensors of a graph that may share memory, and the order of writes to them.

    Tensors that may share memory are of one alias set: ops say in their schemas what their results
    alias. A set has one base tensor, with several names after in-place ops, and views of it.
    It is orderly if all writes are to the base tensor, and no view that was made before a write is
    read after it: then a write is a new value of the base, and views are ordinary values.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._parent: dict[torch.fx.Node, torch.fx.Node] = {}
        self._bases: set[torch.fx.Node] = set()
        self._writes: list[tuple[torch.fx.Node, torch.fx.Node]] = []
        self._disorderly: list[torch.fx.Node] = []
        self._items: dict[tuple[Any, ...], torch.fx.Node] = {}
        self._position = {node: k for k, node in enumerate(graph.nodes)}
        for node in graph.nodes:
            self._parent[node] = node
            self._add(node)
        self._written_at: dict[torch.fx.Node, list[int]] = {}
        for writer, written in self._writes:
            self._written_at.setdefault(self._alias_set(written), []).append(self._position[writer])
        self._disorderly_sets = {self._alias_set(node) for node in self._disorderly}
        self._disorderly_sets |= set(self._sets_with_late_views())

    def orderly_calls(self) -> set[torch.fx.Node]:
        """Return the calls of ATen's ops that touch orderly alias sets only."""
        return {
            node
            for node in self._position
            if node.op == "call_function"
            and _is_described(node.target)
            and node.target not in STRIDED
            and not any(
                self._alias_set(one) in self._disorderly_sets
                for one in (node, *node.all_input_nodes)
            )
        }

    def written_bases(self) -> dict[torch.fx.Node, torch.fx.Node]:
        """Return the names of written base tensors of orderly alias sets, with the set."""
        return {
            node: alias_set
            for node in self._bases
            if (alias_set := self._alias_set(node)) in self._written_at
            and alias_set not in self._disorderly_sets
        }

    def read_at_last(self, op: Any) -> set[torch.fx.Node]:
        """Return the calls of an op whose memory nothing writes to later."""
        calls = [node for node in self._position if node.target is op]
        return {
            node for node in calls if all(at < self._position[node] for at in self._writes_to(node))
        }

    def written_once(self, op: Any) -> dict[torch.fx.Node, torch.fx.Node]:
        """Return writers of a view by an op that nothing else reads, and the view.

        The writer writes to nothing else, and nothing reads its result.
        """
        writers = {}
        for writer, written in self._writes:
            if written.target is op and list(written.users) == [writer] and not writer.users:
                if [one for by, one in self._writes if by is writer] == [written]:
                    writers[writer] = written
        return writers

    def _writes_to(self, node: torch.fx.Node) -> list[int]:
        return self._written_at.get(self._alias_set(node), [])

    def _alias_set(self, node: torch.fx.Node) -> torch.fx.Node:
        while self._parent[node] is not node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def _sets_with_late_views(self) -> Iterator[torch.fx.Node]:
        for node, position in self._position.items():
            writes = self._written_at.get(self._alias_set(node))
            if writes is None or node in self._bases:
                continue
            next_write = min((at for at in writes if at > position), default=None)
            if next_write is not None:
                if any(self._position[user] > next_write for user in node.users):
                    yield self._alias_set(node)

    def _add(self, node: torch.fx.Node) -> None:
        """Record what a node aliases and writes."""
        if node.op == "output":
            return
        sources, written = self._aliased_and_written(node)
        for source in sources:
            self._parent[self._alias_set(source)] = self._alias_set(node)
        self._writes += [(node, one) for one in written]
        if not sources or (sources == written and len(written) == 1 and sources[0] in self._bases):
            self._bases.add(node)
        self._disorderly += [one for one in written if one not in self._bases]
        if len(sources) > 1:
            self._disorderly.append(node)

    def _aliased_and_written(
        self, node: torch.fx.Node
    ) -> tuple[list[torch.fx.Node], list[torch.fx.Node]]:
        if node.op != "call_function":
            return [], []
        if node.target is operator.getitem:
            source = node.args[0]
            assert isinstance(source, torch.fx.Node)
            first = self._items.setdefault((source, node.args[1]), node)
            if first is not node:
                return [first], []
            # The items of a sequence of new tensors do not alias each other.
            return ([] if source in self._bases else [source]), []
        if not isinstance(node.target, torch._ops.OpOverload):
            self._disorderly += [node, *node.all_input_nodes]
            return list(node.all_input_nodes), []
        return declared_aliases(node, node.target)


def declared_aliases(
    node: torch.fx.Node, op: torch._ops.OpOverload
) -> tuple[list[torch.fx.Node], list[torch.fx.Node]]:
    """Return the arguments whose memory a call's op views or writes, and those that it writes.

    As its schema says it, not as it was called: results of ops that are not run a second time while
    a step is captured have storages of their own, also where they are views.
    """
    aliased, written = [], []
    for k, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None:
            value = node.args[k] if k < len(node.args) else node.kwargs.get(argument.name)
            found: list[torch.fx.Node] = []
            torch.fx.map_arg(value, found.append)
            aliased += found
            written += found if argument.alias_info.is_write else []
    return aliased, written


def shared_memory(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the arguments in whose memory the results of a node lie, by its schema."""
    if node.target is operator.getitem:
        return node.all_input_nodes
    if isinstance(node.target, torch._ops.OpOverload):
        return declared_aliases(node, node.target)[0]
    return []


def _is_described(target: Any) -> bool:
    """Return whether the op declares what it writes and aliases, and depends on no value."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in DESCRIBED:
        return False
    return torch.Tag.data_dependent_output not in target.tags
