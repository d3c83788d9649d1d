# SPDX-License-Identifier: Apache-2.0
"""Ops that the capture keeps until loops are found, in terms of those that every stage knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.utils import _pytree as pytree

from amp_ir.capture.cell_loops.cells import BACKWARD, FORWARD
from amp_ir.capture.cell_loops.graph_writer import arguments, place, value
from amp_ir.capture.functional import (
    clean,
    core_decompositions,
    decomposition_table,
    trace_functional,
)
from amp_ir.capture.symbolic_float import FloatTape
from amp_ir.ir.location import META_KEY

aten = torch.ops.aten
_OF_ENTRIES = (aten.select_backward.default, aten.select_scatter.default)
_KINDS = {op: kind.forward for op, kind in FORWARD.items()}
_KINDS |= {op: kind.backward for op, kind in BACKWARD.items()}


def decompose_ops(graph: torch.fx.Graph, tape: FloatTape, mode: FakeTensorMode) -> None:
    """Replace every call of a cell, of its gradient and of `_OF_ENTRIES` by smaller ops."""
    calls = [node for node in graph.nodes if node.target in {*_KINDS, *_OF_ENTRIES}]
    if not calls:
        return
    kept = {op: core_decompositions()[op] for op in _OF_ENTRIES}
    decompositions = {**decomposition_table(tape), **kept}
    known: dict[Any, torch.fx.Graph] = {}
    for node in calls:
        key = _key(node)
        if key not in known:
            known[key] = _traced(node, decompositions, mode)
        _insert(graph, node, known[key])
    _drop_workspaces(graph)


def _key(node: Node) -> Any:
    """Return what the decomposition of a call depends on."""
    seen: dict[Node, int] = {}

    def described(one: Any) -> Any:
        if isinstance(one, Node):
            val = one.meta["val"]
            kind = (val.dtype, tuple(val.shape), tuple(val.stride()), val.device)
            return seen.setdefault(one, len(seen)), kind
        return tuple(one) if isinstance(one, (list, tuple)) else (type(one), one)

    return (node.target, *map(described, node.args))


def _traced(
    node: Node, decompositions: dict[Any, Callable[..., Any]], mode: FakeTensorMode
) -> torch.fx.Graph:
    """Return the graph of a call; its placeholders are the tensors that the call reads."""
    sources = node.all_input_nodes
    function: Any = _KINDS.get(node.target, node.target)

    def call(*tensors: torch.Tensor) -> Any:
        now = dict(zip(sources, tensors, strict=True))
        args = torch.fx.map_arg(node.args, now.__getitem__)
        made = function(*args)
        # Cells of one result return a tuple of it, unlike their op.
        is_one = isinstance(made, tuple) and isinstance(node.meta["val"], torch.Tensor)
        return made[0] if is_one else made

    values = [one.meta["val"] for one in sources]
    traced = trace_functional(call, values, decompositions, mode)
    clean(traced.graph)
    return traced.graph


def _insert(graph: torch.fx.Graph, node: Node, inner: torch.fx.Graph) -> None:
    """Put the nodes of a decomposition where a call is."""
    sources = iter(node.all_input_nodes)
    now: dict[Node, Node] = {}
    with graph.inserting_before(node):
        for one in inner.nodes:
            if one.op == "placeholder":
                now[one] = next(sources)
            elif one.op == "output":
                results = pytree.tree_map(now.__getitem__, one.args[0])
            else:
                now[one] = graph.node_copy(one, now.__getitem__)
                now[one].meta[META_KEY] = place(node)
    if isinstance(results, Node):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)


def _drop_workspaces(graph: torch.fx.Graph) -> None:
    """Let the gradient of a cell read what the workspace was concatenated from.

    Before:  a, b = split_with_sizes(cat([x, y], 1), [n, m], 1)    # x of width n, y of width m
    After:   a, b = x, y
    """
    for node in list(graph.nodes):
        if node.target is not aten.split_with_sizes.default:
            continue
        whole, sizes, axis = arguments(node, None, None, 0)
        if whole.target is not aten.cat.default:
            continue
        parts, joined = arguments(whole, None, 0)
        if axis != joined or sizes != [value(one).shape[axis] for one in parts]:
            continue
        for user in list(node.users):
            user.replace_all_uses_with(parts[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
