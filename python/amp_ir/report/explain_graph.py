# SPDX-License-Identifier: Apache-2.0
"""A cast plan as a graph: nodes and edges, and their positions on the page.

A node is an op, or, where there are too many, a run of ops of one module. The forward pass runs
down at the left; the backward pass runs up at the right, beside what it differentiates; the
optimizer is one node at the top right.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

# More nodes than this are drawn as modules.
MAX_OPS = 90
MAX_MODULES = 140
PHASES = ("forward", "backward", "optimizer")
_OUTSIDE = "outside of modules"


@attrs.define(eq=False)
class Node:
    """A box: ops of one phase; `arrange` sets `row` and `column`."""

    number: int
    label: str
    phase: str
    ops: list[Any]
    row: int = 0
    column: float = 0.0

    def leaning(self, low: str) -> float:
        """Return the share of its ops that touch the low dtype."""
        return sum(low in (*op.reads, *op.results) for op in self.ops) / len(self.ops)


@attrs.frozen
class Edge:
    """Tensors from one node to another; `casts` counts those that are cast in between."""

    source: Node
    target: Node
    tensors: int
    dtypes: tuple[str, ...]
    casts: tuple[str, ...]
    is_alone: bool


@attrs.define
class Graph:
    """A drawing. `is_folded` says that nodes are runs of ops."""

    nodes: list[Node]
    edges: list[Edge]
    is_folded: bool


def graph_of(plan: Any, rows: Sequence[Any]) -> Graph:
    """Return the rows of a plan as a graph, arranged."""
    ops = [row.op for row in rows if row.op.results or row.op.reads]
    nodes, is_folded = _nodes(ops)
    edges = _edges(plan, nodes)
    arrange(nodes, edges)
    return Graph(nodes, edges, is_folded)


def _nodes(ops: Sequence[Any]) -> tuple[list[Node], bool]:
    inside = [op for op in ops if op.phase != "optimizer"]
    last = [op for op in ops if op.phase == "optimizer"]
    is_folded = len(inside) > MAX_OPS
    if is_folded:
        runs = _runs(inside)
    else:
        runs = [(_short(op.name), [op]) for op in inside]
    if last:
        runs.append(("optimizer", last))
    return [
        Node(number, label, group[0].phase, group) for number, (label, group) in enumerate(runs)
    ], is_folded


def _short(name: str) -> str:
    return name.removeprefix("relax.").removeprefix("amp_ir.").removeprefix("nn.")


def _runs(ops: Sequence[Any]) -> list[tuple[str, list[Any]]]:
    """Group neighbours in program order of one module and phase, to the deepest paths that fit."""
    deepest = max(op.module.count(".") + 1 for op in ops)
    runs: list[tuple[str, list[Any]]] = []
    for depth in range(deepest, 0, -1):
        keys = [(_cut(op.module, depth), op.phase) for op in ops]
        pairs = itertools.groupby(zip(keys, ops, strict=True), key=lambda pair: pair[0])
        runs = [(key[0], [op for _, op in group]) for key, group in pairs]
        if len(runs) <= MAX_MODULES:
            break
    return runs


def _cut(module: str, depth: int) -> str:
    return ".".join(module.split(".")[:depth]) if module else _OUTSIDE


def _edges(plan: Any, nodes: Sequence[Node]) -> list[Edge]:
    home = {op.id: node for node in nodes for op in node.ops}
    alone = {(cast.source, cast.to_dtype) for cast in plan.casts if cast.is_alone}
    found: dict[tuple[int, int], list[tuple[str, str, bool]]] = {}
    for node in nodes:
        for op in node.ops:
            for source, left, read in zip(op.sources, op.left, op.reads, strict=True):
                maker = home.get(source)
                if maker is not None and maker is not node:
                    tensor = (left, read, (source, read) in alone)
                    found.setdefault((maker.number, node.number), []).append(tensor)
    return [
        Edge(
            nodes[a],
            nodes[b],
            len(tensors),
            tuple(dict.fromkeys(read for _, read, _ in tensors)),
            tuple(f"{left} to {read}" for left, read, _ in tensors if left != read),
            any(is_alone and left != read for left, read, is_alone in tensors),
        )
        for (a, b), tensors in found.items()
    ]


def arrange(nodes: Sequence[Node], edges: Sequence[Edge]) -> None:
    """Give every node a row and a column; columns of the two passes do not overlap."""
    forward = [node for node in nodes if node.phase == "forward"]
    backward = [node for node in nodes if node.phase == "backward"]
    rows = _depths(forward, edges)
    for node in forward:
        node.row = rows[node.number]
    behind = _depths(backward, edges)
    bottom = max([*rows.values(), *behind.values()], default=0)
    for node in backward:
        node.row = bottom - behind[node.number]
    width = _spread(forward, edges, first=0.0)
    _spread(backward, edges, first=width + 0.5 if forward else 0.0)
    for node in nodes:
        if node.phase == "optimizer":
            node.row = -1
            node.column = 1.0 + max((one.column for one in nodes if one is not node), default=-1.0)


def _depths(nodes: Sequence[Node], edges: Iterable[Edge]) -> dict[int, int]:
    """Return the length of the longest path to each node from the nodes without a source."""
    known = {node.number: 0 for node in nodes}
    ordered = sorted(edges, key=lambda edge: (edge.target.number, edge.source.number))
    for edge in ordered:
        a, b = edge.source.number, edge.target.number
        if a in known and b in known:
            known[b] = max(known[b], known[a] + 1)
    return known


def _spread(nodes: Sequence[Node], edges: Sequence[Edge], *, first: float) -> float:
    """Set columns from `first` on, each row in its neighbours' order of columns; return the end."""
    rows: dict[int, list[Node]] = {}
    for node in nodes:
        rows.setdefault(node.row, []).append(node)
    around: dict[int, list[Node]] = {}
    for edge in edges:
        around.setdefault(edge.target.number, []).append(edge.source)
        around.setdefault(edge.source.number, []).append(edge.target)
    mine = {node.number for node in nodes}
    for row in rows.values():
        for place, node in enumerate(row):
            node.column = first + place
    widest = max((len(row) for row in rows.values()), default=0)
    for _sweep in range(4):
        for number in sorted(rows):
            row = sorted(rows[number], key=lambda node: _middle(node, around, mine))
            start = sum(_middle(node, around, mine) for node in row) / len(row)
            start = min(max(start - (len(row) - 1) / 2, first), first + widest - len(row))
            for place, node in enumerate(row):
                node.column = start + place
    return first + widest


def _middle(node: Node, around: dict[int, list[Node]], mine: set[int]) -> float:
    columns = [one.column for one in around.get(node.number, ()) if one.number in mine]
    return sum(columns) / len(columns) if columns else node.column


def casts_in(edge: Edge) -> str:
    """Describe the casts of an edge, equal ones once with their number."""
    counts = Counter(edge.casts)
    return ", ".join(text if n == 1 else f"{n} x {text}" for text, n in counts.items())
