# SPDX-License-Identifier: Apache-2.0
"""Loops over LSTM, GRU and RNN cells become recurrent layers.

A loop that a user writes is unrolled in a captured graph: one call of a cell per time step, and one
gradient each. Where each call continues from the states of the one before, and no input depends on
those, the calls equal one recurrent layer, whose size does not depend on the number of steps.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_ir.capture.cell_loops.cells import (
    BACKWARD,
    Cell,
    CellGradient,
    cells_of,
    chains,
    gradients_of,
    independent_parts,
    latest_read,
)
from amp_ir.capture.cell_loops.decompose_ops import decompose_ops
from amp_ir.capture.cell_loops.graph_writer import GraphWriter
from amp_ir.capture.cell_loops.layer import Layer, write_layer
from amp_ir.capture.cell_loops.layer_gradient import Link, link_of, runs, write_gradient
from amp_ir.capture.cell_loops.merge_assignments import merge_assignments
from amp_ir.capture.cell_loops.merge_steps import merge_gradients_of_entries, merge_stacks
from amp_ir.capture.cell_loops.sums import is_sum
from amp_ir.capture.dead_code import drop_dead_code
from amp_ir.capture.symbolic_float import FloatTape


def find_cell_loops(
    module: torch.fx.GraphModule, tape: FloatTape, mode: FakeTensorMode
) -> torch.fx.GraphModule:
    """Replace chains of cells by layers, and decompose every other cell.

    Before:  h1 = lstm_cell(x[0], h0, ...); h2 = lstm_cell(x[1], h1, ...); y = stack([h1, h2])
    After:   states = lstm(x @ w + b, ..., h0); y = states[1:]

    - The gradients of a chain become one gradient of the layer, where nothing else reads what they
      pass on; else one for each part.
    - The inputs of a layer are the tensor that they are entries of, or are concatenated.

    Requires: a functional graph.
    Ensures:  the same values, up to roundings: cells and gradients of states are carried in
              float32, and gradients of weights are one sum. No op of `amp_ir_cell` is left.
    """
    graph = module.graph
    merge_assignments(GraphWriter(graph, mode))
    GraphWriter(graph, mode).sort()
    cells = cells_of(graph)
    if cells:
        _Loops(graph, mode, cells).run()
    writer = GraphWriter(graph, mode)
    merge_gradients_of_entries(writer)
    merge_stacks(writer)
    writer.sort()
    drop_dead_code(graph)
    decompose_ops(graph, tape, mode)
    drop_dead_code(graph)
    return module


class _Loops:
    def __init__(
        self, graph: torch.fx.Graph, mode: FakeTensorMode, cells: dict[torch.fx.Node, Cell]
    ) -> None:
        self.graph = graph
        self.writer = GraphWriter(graph, mode)
        self.cells = cells
        # What belongs together is known before anything is replaced.
        self.gradients: dict[torch.fx.Node, list[CellGradient]] = {}
        for one in gradients_of(graph, cells).values():
            self.gradients.setdefault(one.cell.node, []).append(one)

    def run(self) -> None:
        layers = []
        for chain in list(chains(self.cells)):
            if len(chain) > 1:
                layers += self._layers(chain)
        for layer in reversed(layers):
            self._gradients(layer)

    def _layers(self, chain: Sequence[Cell]) -> list[Layer]:
        """Write a layer for each part of a chain whose inputs do not depend on its states."""
        self.writer.sort()
        members = [cell.node for cell in chain]
        reads = {cell.node: [cell.x] for cell in chain}
        latest = latest_read(self.graph, members, reads)
        parts = [part for part in independent_parts(latest) if len(part) > 1]
        return [write_layer(self.writer, [chain[k] for k in part]) for part in parts]

    def _gradients(self, layer: Layer) -> None:
        positions = {cell.node: k for k, cell in enumerate(layer.cells)}
        gradients = [one for cell in layer.cells for one in self.gradients.get(cell.node, ())]
        by_position: list[list[CellGradient]] = [[] for _ in layer.cells]
        for one in gradients:
            by_position[positions[one.cell.node]].append(one)
        links = {}
        for k, here in enumerate(by_position):
            after = by_position[k + 1] if k + 1 < len(by_position) else []
            later = {found: one for one in after if (found := one.of_state(0)) is not None}
            links.update({one.node: link_of(one, later) for one in here})
        for run in list(runs(links)):
            self.writer.sort()
            members = [link.gradient.node for link in run]
            reads = {link.gradient.node: link.reads for link in run}
            latest = latest_read(self.graph, members, reads)
            for part in independent_parts(latest):
                chosen = [run[k] for k in part]
                chosen[0] = Link(chosen[0].gradient)
                write_gradient(self.writer, layer, chosen, positions)
            self._erase(link.gradient.node for link in reversed(run))

    def _erase(self, replaced: Iterable[torch.fx.Node]) -> None:
        """Erase the gradients of cells that layers replace, the one of the first cell first.

        Sums of gradients that only they read go with them, so that what is left has no more readers
        than it seems.
        """
        erased = set()
        for node in replaced:
            waiting = [node, *node.users]
            while waiting:
                one = waiting.pop()
                if one in erased or one.users or not (is_sum(one) or _is_of_cell(one)):
                    continue
                erased.add(one)
                waiting += one.all_input_nodes
                self.graph.erase_node(one)


def _is_of_cell(node: torch.fx.Node) -> bool:
    """Return whether a node is the gradient of a cell, or one of its results."""
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, torch.fx.Node) and source.target in BACKWARD
