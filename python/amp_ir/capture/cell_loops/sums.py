# SPDX-License-Identifier: Apache-2.0
"""Sums of a graph, as autograd writes them: two terms at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.fx import Node

from amp_ir.capture.cell_loops.graph_writer import value

aten = torch.ops.aten


def is_sum(node: Node) -> bool:
    """Return whether a node adds two tensors of one shape and dtype."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    left, right = node.args
    if not isinstance(left, Node) or not isinstance(right, Node) or left is right:
        return False
    kinds = {(value(one).shape, value(one).dtype) for one in (node, left, right)}
    return len(kinds) == 1


def terms_of(total: Node) -> list[Node]:
    """Return the terms of a sum whose partial sums nothing else reads; uses a stack: it is deep."""
    terms, waiting = [], [total]
    while waiting:
        node = waiting.pop()
        if is_sum(node) and (node is total or len(node.users) == 1):
            waiting += reversed(node.all_input_nodes)
        else:
            terms.append(node)
    return terms


def totals_of(nodes: Iterable[Node]) -> Iterator[tuple[Node, list[Node]]]:
    """Yield each outermost sum with those of `nodes` that are its terms; a term alone is one."""
    roots: dict[Node, Node] = {}
    groups: dict[Node, list[Node]] = {}
    for node in nodes:
        path = [node]
        while path[-1] not in roots:
            users = list(path[-1].users)
            if len(users) != 1 or not is_sum(users[0]):
                roots[path[-1]] = path[-1]
                break
            path.append(users[0])
        root = roots[path[-1]]
        roots.update(dict.fromkeys(path, root))
        groups.setdefault(root, []).append(node)
    yield from groups.items()


def without_term(graph: torch.fx.Graph, term: Node) -> None:
    """Drop a term of a sum that has other terms."""
    (total,) = term.users
    left, right = total.all_input_nodes
    total.replace_all_uses_with(right if left is term else left)
    graph.erase_node(total)
