# SPDX-License-Identifier: Apache-2.0
"""New nodes of a functional graph, with the fake tensors that describe their results."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from amp_ir.ir.location import META_KEY, Location

aten = torch.ops.aten


def value(node: Node) -> torch.Tensor:
    """Return the fake tensor that describes a node."""
    found = node.meta["val"]
    assert isinstance(found, torch.Tensor)
    return found


def arguments(node: Node, *defaults: Any) -> list[Any]:
    """Return the positional arguments of a call, and `defaults` for the last ones where absent.

    The number of defaults is that of all arguments; those that a call always has may be any.
    """
    return [*node.args, *defaults[len(node.args) :]]


def place(node: Node) -> Location:
    """Return where a node comes from."""
    found = node.meta.get(META_KEY, Location())
    assert isinstance(found, Location)
    return found


class GraphWriter:
    """A writer at the end of a graph; `sort` puts the nodes in an order that can run."""

    def __init__(self, graph: torch.fx.Graph, mode: FakeTensorMode) -> None:
        self.graph = graph
        self.mode = mode
        self.end = next(iter(reversed(graph.nodes)))
        self.location = Location()

    def emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Write a call and return its node."""
        node = self._call(target, args, kwargs)
        given, named = torch.fx.map_arg((args, kwargs), lambda one: one.meta["val"])
        with self.mode, torch.no_grad():
            node.meta["val"] = target(*given, **named)
        node.meta[META_KEY] = self.location
        return node

    def entry(self, node: Node, index: int, like: Node | None) -> Node:
        """Return an entry of the first axis; `like` is another one, whose description it shares."""
        if like is None:
            return self.emit(aten.select.int, node, 0, index)
        made = self._call(aten.select.int, (node, 0, index), {})
        made.meta["val"], made.meta[META_KEY] = like.meta["val"], self.location
        return made

    def _call(
        self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Node:
        with self.graph.inserting_before(self.end):
            return self.graph.call_function(target, args, kwargs)

    def results(self, target: Callable[..., Any], *args: Any) -> list[Node]:
        """Write a call and return the nodes of its results."""
        node = self.emit(target, *args)
        if isinstance(node.meta["val"], torch.Tensor):
            return [node]
        return [self.emit(operator.getitem, node, k) for k in range(len(node.meta["val"]))]

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        """Return the value in a dtype."""
        if value(node).dtype == dtype:
            return node
        return self.emit(aten._to_copy.default, node, dtype=dtype)

    def view(self, node: Node, shape: Sequence[int]) -> Node:
        """Return the value in another shape; the order of its elements is that of its indices."""
        if tuple(value(node).shape) == tuple(shape):
            return node
        return self.emit(aten.view.default, self.contiguous(node), list(shape))

    def contiguous(self, node: Node) -> Node:
        """Return the value in memory in the order of its indices."""
        if value(node).is_contiguous():
            return node
        return self.emit(aten.clone.default, node, memory_format=torch.contiguous_format)

    def moved(self, node: Node, source: int, target: int) -> Node:
        """Return the value with an axis moved to another position."""
        if source == target:
            return node
        axes = list(range(value(node).dim()))
        axes.insert(target, axes.pop(source))
        return self.emit(aten.permute.default, node, axes)

    def sliced(self, node: Node, axis: int, begin: int, end: int, stride: int = 1) -> Node:
        """Return the part [begin, end) of an axis, or every entry `stride` after the last one."""
        if (begin, end, stride) == (0, value(node).shape[axis], 1):
            return node
        strided = () if stride == 1 else (stride,)
        return self.emit(aten.slice.Tensor, node, axis, begin, end, *strided)

    def zeros(self, shape: Sequence[int], like: torch.Tensor) -> Node:
        """Return zeros of the dtype and on the device of `like`."""
        return self.emit(
            aten.full.default,
            list(shape),
            0.0,
            dtype=like.dtype,
            layout=torch.strided,
            device=like.device,
            pin_memory=False,
        )

    def transposed(self, node: Node) -> Node:
        """Return a matrix's transpose."""
        return self.emit(aten.permute.default, node, [1, 0])

    def sort(self) -> None:
        """Put every node after what it reads; nodes keep their order where that allows it."""
        placed: set[Node] = set()
        nodes = list(self.graph.nodes)
        most = 1 + sum(len(node.all_input_nodes) for node in nodes)
        for node in nodes:
            waiting = [node]
            while waiting:
                assert len(waiting) <= most, "a value of the graph depends on itself"
                one = waiting[-1]
                missing = [source for source in one.all_input_nodes if source not in placed]
                if missing and one not in placed:
                    waiting += reversed(missing)
                    continue
                waiting.pop()
                if one not in placed:
                    placed.add(one)
                    if one is not self.end:
                        self.end.prepend(one)
