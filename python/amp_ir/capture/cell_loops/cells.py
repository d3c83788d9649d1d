# SPDX-License-Identifier: Apache-2.0
"""The cell calls of a graph, their gradients, and the chains that they form."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.fx import Node

from amp_ir.capture.cell_loops.graph_writer import place
from amp_ir.capture.decompositions.cell_ops import CELL_KINDS, CellKind

FORWARD = {kind.forward_op: kind for kind in CELL_KINDS}
BACKWARD = {kind.backward_op: kind for kind in CELL_KINDS}


@attrs.frozen(eq=False)
class Cell:
    """One call of a cell; `results` are the nodes of its results, those that the graph has."""

    kind: CellKind
    node: Node
    results: dict[int, Node]

    @property
    def x(self) -> Node:
        """The input [n, i]."""
        return self._given(0)

    @property
    def states(self) -> list[Node]:
        """The hidden state [n, h], and the cell state of an LSTM."""
        return [self._given(1 + k) for k in range(self.kind.state_count)]

    @property
    def params(self) -> tuple[Any, ...]:
        """Both weights and both biases, or None for those."""
        return self.node.args[1 + self.kind.state_count : -1]

    @property
    def low(self) -> torch.dtype | None:
        """The dtype of the user's torch.autocast region."""
        low: Any = self.node.args[-1]
        return low

    def _given(self, position: int) -> Node:
        found = self.node.args[position]
        assert isinstance(found, Node)
        return found


@attrs.frozen(eq=False)
class CellGradient:
    """The gradient of one call; `results` are of x, the states, the weights and the biases."""

    cell: Cell
    node: Node
    results: dict[int, Node]

    @property
    def above(self) -> list[Node]:
        """The gradients of the new states."""
        found = self.node.args[: self.cell.kind.state_count]
        return [one for one in found if isinstance(one, Node)]

    def of_state(self, k: int) -> Node | None:
        """Return the gradient of the k-th state, if the graph reads it."""
        return self.results.get(1 + k)

    def of_param(self, k: int) -> Node | None:
        """Return the gradient of the k-th parameter, if the graph reads it."""
        return self.results.get(1 + self.cell.kind.state_count + k)


def cells_of(graph: torch.fx.Graph) -> dict[Node, Cell]:
    """Return the calls whose results only their own gradients and readers of states read."""
    found = {}
    for node in graph.nodes:
        kind = FORWARD.get(node.target)
        results = None if kind is None else _results(node, kind.result_count)
        if kind is not None and results is not None:
            found[node] = Cell(kind, node, results)
    gradients = set(gradients_of(graph, found))
    return {
        node: cell
        for node, cell in found.items()
        if all(one in gradients for one in _readers_of_workspace(cell))
    }


def gradients_of(graph: torch.fx.Graph, cells: Mapping[Node, Cell]) -> dict[Node, CellGradient]:
    """Return the gradients of these calls."""
    found = {}
    for node in graph.nodes:
        kind = BACKWARD.get(node.target)
        cell = None if kind is None else _cell_of(node, kind, cells)
        results = None if kind is None else _results(node, 5 + kind.state_count)
        if cell is not None and results is not None:
            found[node] = CellGradient(cell, node, results)
    return found


def chains(cells: Mapping[Node, Cell]) -> Iterator[list[Cell]]:
    """Yield the calls in which each one continues from the states of the one before."""
    continued: dict[Node, Cell] = {}
    begins = []
    for cell in cells.values():
        before = _before(cell, cells)
        if before is None or before.node in continued:
            begins.append(cell)
        else:
            continued[before.node] = cell
    for cell in begins:
        chain = [cell]
        while chain[-1].node in continued:
            chain.append(continued[chain[-1].node])
        yield chain


def latest_read(
    graph: torch.fx.Graph, members: Sequence[Node], reads: Mapping[Node, Sequence[Node]]
) -> list[int]:
    """Return for each member the latest one that what it reads depends on; -1 for none.

    `reads` maps a member to those of its operands that count. The graph is in an order that can
    run.
    """
    position = {node: k for k, node in enumerate(members)}
    latest: dict[Node, int] = {}
    found = [-1] * len(members)
    for node in graph.nodes:
        at = position.get(node)
        sources = node.all_input_nodes if at is None else reads[node]
        newest = max((latest.get(one, -1) for one in sources), default=-1)
        if at is None:
            if newest >= 0:
                latest[node] = newest
        else:
            found[at], latest[node] = newest, at
    return found


def independent_parts(latest: Sequence[int]) -> Iterator[range]:
    """Yield the longest runs of members none of which reads what depends on another one."""
    begin = 0
    for k, newest in enumerate(latest):
        if newest >= begin:
            yield range(begin, k)
            begin = k
    yield range(begin, len(latest))


def _results(node: Node, count: int) -> dict[int, Node] | None:
    """Return the nodes of the results; None where a reader is unusual."""
    if count == 1:
        return {0: node}
    found: dict[int, Node] = {}
    for user in node.users:
        if user.target is not operator.getitem or user.args[1] in found:
            return None
        found[int(user.args[1])] = user  # type: ignore[arg-type]
    return found


def _readers_of_workspace(cell: Cell) -> list[Node]:
    workspace = cell.results.get(cell.kind.state_count) if cell.kind.workspace_width else None
    return [] if workspace is None else list(workspace.users)


def _cell_of(node: Node, kind: CellKind, cells: Mapping[Node, Cell]) -> Cell | None:
    """Return the call that this is the gradient of: it reads the same, and what that returned."""
    count = kind.state_count
    read = node.args[count : 2 * count + 1]
    made = node.args[2 * count + 1 : 2 * count + 1 + kind.result_count]
    last = made[-1]
    assert isinstance(last, Node)
    source = last if kind.result_count == 1 else last.args[0]
    cell = cells.get(source) if isinstance(source, Node) else None
    if cell is None or cell.kind is not kind:
        return None
    expected = tuple(cell.results.get(k) for k in range(kind.result_count))
    fits = made == expected and read == (cell.x, *cell.states)
    return cell if fits and node.args[-3:] == (*cell.params[:2], cell.low) else None


def _before(cell: Cell, cells: Mapping[Node, Cell]) -> Cell | None:
    """Return the call from whose states this one continues, of the same module."""
    hidden = cell.states[0]
    source = hidden if cell.kind.result_count == 1 else hidden.args[0] if hidden.args else None
    before = cells.get(source) if isinstance(source, Node) else None
    if before is None or before.kind is not cell.kind:
        return None
    if cell.states != [before.results.get(k) for k in range(cell.kind.state_count)]:
        return None
    one, other = place(before.node), place(cell.node)
    is_alike = (before.params, before.low) == (cell.params, cell.low)
    where = [(at.module, at.phase, at.precision) for at in (one, other)]
    return before if is_alike and where[0] == where[1] else None
