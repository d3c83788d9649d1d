# SPDX-License-Identifier: Apache-2.0
"""A graph of symbolic sizes, compiled for each shape that comes: programs have static shapes."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

_log = logging.getLogger("amp_ir")


def has_symbols(example_inputs: Sequence[Any]) -> bool:
    """Return whether a graph takes numbers, or tensors with sizes that are symbols."""
    return any(
        isinstance(extent, torch.SymInt)
        for one in example_inputs
        for extent in ((*one.shape, *one.stride()) if isinstance(one, torch.Tensor) else (one,))
    ) or any(isinstance(one, (int, float, torch.SymFloat, torch.SymBool)) for one in example_inputs)


class ShapeFamily:
    """A graph that is compiled again for other shapes, strides or numbers.

    The programs of the `limit` shapes used last are kept; what does not stay is logged.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        compile_static: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
        limit: int,
    ) -> None:
        self._graph_module = graph_module
        self._compile = compile_static
        self._limit = limit
        self._programs: collections.OrderedDict[Any, Callable[..., Any]] = collections.OrderedDict()
        self._has_warned = False

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph, compiling first for new shapes."""
        key = tuple(map(_key, inputs))
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._compiled(inputs)
            self._drop_oldest()
        self._programs.move_to_end(key)
        return program(*(one for one in inputs if isinstance(one, torch.Tensor)))

    def _compiled(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        shapes = [tuple(one.shape) if isinstance(one, torch.Tensor) else one for one in inputs]
        _log.info("torch.compile(backend='amp_ir'): compiling a dynamic graph for %s", shapes)
        tensors = [one for one in inputs if isinstance(one, torch.Tensor)]
        return torch._dynamo.disable(self._compile)(
            _with_numbers(self._graph_module, inputs), tensors
        )

    def _drop_oldest(self) -> None:
        if len(self._programs) <= self._limit:
            return
        self._programs.popitem(last=False)
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "torch.compile(backend='amp_ir'): a graph was called with more than %d shapes; the "
                "program of the one not used for longest is dropped, and compiled again when it "
                "comes back. Pad batches to fewer shapes, or pass options={'max_shapes': ...}",
                self._limit,
            )


def _key(one: Any) -> Any:
    if not isinstance(one, torch.Tensor):
        return type(one), one
    return tuple(one.shape), one.stride(), one.dtype, one.requires_grad


def _with_numbers(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """Return the graph of tensors alone, with the values of the numbers among its inputs."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}), None)
    placeholders = graph.find_nodes(op="placeholder")
    for node, given in zip(placeholders, inputs, strict=True):
        if not isinstance(given, torch.Tensor):
            node.replace_all_uses_with(given)
            graph.erase_node(node)
    return fx.GraphModule(graph_module, graph)
