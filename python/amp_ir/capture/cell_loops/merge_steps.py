# SPDX-License-Identifier: Apache-2.0
"""Stacks of the entries of one tensor, and sums of the gradients of entries, in one op each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node

from amp_ir.capture.cell_loops.graph_writer import GraphWriter, arguments, place, value
from amp_ir.capture.cell_loops.steps import existing_stack, stack
from amp_ir.capture.cell_loops.sums import totals_of, without_term

aten = torch.ops.aten


def merge_stacks(writer: GraphWriter) -> None:
    """Replace the concatenation of consecutive entries of a tensor by a part of that tensor.

    Before:  y = cat([select(x, 0, 1), select(x, 0, 2)], 1)    # select: [n, h]
    After:   y = view(permute(x[1:3], [1, 0, 2]), [n, 2 h])
    """
    for node in list(writer.graph.nodes):
        if node.target is not aten.cat.default:
            continue
        given, axis = arguments(node, None, 0)
        parts: list[Node] = list(given)
        ndim = value(node).dim()
        axis %= ndim
        if all(one.target is aten.unsqueeze.default for one in parts):
            inner = [arguments(one) for one in parts]
            if all(at % ndim == axis for _, at in inner):
                parts = [one for one, _ in inner]
        writer.location = place(node)
        whole = existing_stack(writer, parts) if len(parts) > 1 else None
        if whole is not None:
            moved = writer.contiguous(writer.moved(whole, 0, axis))
            node.replace_all_uses_with(writer.view(moved, value(node).shape))
            writer.graph.erase_node(node)


def merge_gradients_of_entries(writer: GraphWriter) -> None:
    """Replace a sum of the gradients of a tensor's entries by the stack of those.

    Before:  y = add(select_backward(a, [2, n], 0, 0), select_backward(b, [2, n], 0, 1))
    After:   y = view(cat([a, b]), [2, n])
    """
    backward = aten.select_backward.default
    nodes = [node for node in writer.graph.nodes if node.target is backward]
    for _total, members in list(totals_of(nodes)):
        by_axis: dict[int, dict[int, Node]] = {}
        for one in members:
            _, sizes, axis, index = arguments(one)
            axis %= len(sizes)
            by_axis.setdefault(axis, {}).setdefault(index % sizes[axis], one)
        for axis, by_index in by_axis.items():
            if len(by_index) > 1:
                _merge_entries(writer, axis, by_index)


def _merge_entries(writer: GraphWriter, axis: int, by_index: dict[int, Node]) -> None:
    """Replace these gradients, which are terms of one sum, by one tensor."""
    first, *others = by_index.values()
    writer.location = place(first)
    like = value(arguments(first)[0])
    parts: list[Node] = []
    end = 0
    for run in _consecutive(sorted(by_index)):
        if end < run.start:
            parts.append(writer.zeros((run.start - end, *like.shape), like))
        parts.append(stack(writer, [arguments(by_index[k])[0] for k in run]))
        end = run.stop
    size = value(first).shape[axis]
    if end < size:
        parts.append(writer.zeros((size - end, *like.shape), like))
    whole = parts[0] if len(parts) == 1 else writer.emit(aten.cat.default, parts, 0)
    for other in others:
        without_term(writer.graph, other)
    first.replace_all_uses_with(writer.contiguous(writer.moved(whole, 0, axis)))


def _consecutive(indices: Sequence[int]) -> Iterator[range]:
    """Yield the runs of ascending indices, so that a gap is one tensor of zeros, however long."""
    begin = 0
    for k in range(1, len(indices) + 1):
        if k == len(indices) or indices[k] != indices[k - 1] + 1:
            yield range(indices[begin], indices[k - 1] + 1)
            begin = k
