# SPDX-License-Identifier: Apache-2.0
"""The forward op of a recurrent layer, instead of a chain of cells."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch.fx import Node

from amp_ir.capture.cell_loops.cells import Cell
from amp_ir.capture.cell_loops.graph_writer import GraphWriter, place, value
from amp_ir.capture.cell_loops.steps import is_descending, stack
from amp_ir.capture.decompositions.cell_ops import GRU, LSTM, CellKind
from amp_ir.capture.decompositions.recurrent_ops import wide

aten = torch.ops.aten


@attrs.frozen(eq=False)
class Layer:
    """A written layer: its results, and what it was computed from, in time order.

    `inputs` [t n, i] and both weights are of the dtype that it computes in. `results` are those of
    its op: states [t + 1, n, h], an LSTM's cells, and what its gradient reads.
    """

    kind: CellKind
    cells: tuple[Cell, ...]
    is_reverse: bool
    inputs: Node
    of_input: Node
    of_state: Node
    results: tuple[Node, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the layer computes in."""
        return value(self.inputs).dtype

    def times(self, begin: int, end: int) -> range:
        """Return the time steps, ascending, of the cells [begin, end) of the chain."""
        length = len(self.cells)
        return range(length - end, length - begin) if self.is_reverse else range(begin, end)


def write_layer(writer: GraphWriter, cells: Sequence[Cell]) -> Layer:
    """Replace the states that the cells compute by those of one layer."""
    first = cells[0]
    kind, (of_input, of_state, input_bias, hidden_bias) = first.kind, first.params
    writer.location = place(first.node)
    is_reverse = is_descending([one.x for one in cells])
    in_time = cells[::-1] if is_reverse else cells
    whole = stack(writer, [one.x for one in in_time])
    steps, rows, width = value(whole).shape
    dtype = first.low or value(first.x).dtype
    inputs = writer.cast(writer.view(whole, [steps * rows, width]), dtype)
    of_input, of_state = writer.cast(of_input, dtype), writer.cast(of_state, dtype)
    bias, own_bias = input_bias, []
    if kind is GRU:
        gates = value(of_state)
        own_bias = [writer.zeros(gates.shape[:1], gates) if input_bias is None else hidden_bias]
    elif input_bias is not None:
        bias = writer.emit(aten.add.Tensor, input_bias, hidden_bias)
    initial = [
        writer.cast(state, wide(dtype) if k else dtype) for k, state in enumerate(first.states)
    ]
    made = writer.results(
        getattr(torch.ops.amp_ir, kind.name).default,
        writer.view(
            _gates(writer, inputs, of_input, bias), [steps, rows, value(of_input).shape[0]]
        ),
        of_state,
        *(writer.cast(one, dtype) for one in own_bias),
        *initial,
        is_reverse,
    )
    layer = Layer(kind, tuple(cells), is_reverse, inputs, of_input, of_state, tuple(made))
    for k in range(2 if kind is LSTM else 1):
        _replace_states(writer, layer, k)
    return layer


def _gates(writer: GraphWriter, inputs: Node, weight: Node, bias: Node | None) -> Node:
    across = writer.transposed(weight)
    if bias is None:
        return writer.emit(aten.mm.default, inputs, across)
    bias = writer.cast(bias, value(inputs).dtype)
    return writer.emit(aten.addmm.default, bias, inputs, across)


def _replace_states(writer: GraphWriter, layer: Layer, k: int) -> None:
    """Let readers of the k-th state of each cell read the layer's."""
    inside = {one.node for one in layer.cells}
    results: dict[torch.dtype, Node] = {}
    for position, cell in enumerate(layer.cells):
        state = cell.results.get(k)
        if state is None or all(user in inside for user in state.users):
            continue
        (time,) = layer.times(position, position + 1)
        dtype = value(state).dtype
        if dtype not in results:
            results[dtype] = writer.cast(layer.results[k], dtype)
        entry = writer.emit(
            aten.select.int, results[dtype], 0, time if layer.is_reverse else time + 1
        )
        state.replace_all_uses_with(entry, delete_user_cb=lambda user: user not in inside)
