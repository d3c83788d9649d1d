# SPDX-License-Identifier: Apache-2.0
"""Entries of a tensor that are assigned one after the other, `y[:, t] = h`: one stack of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch.fx import Node

from amp_ir.capture.cell_loops.graph_writer import GraphWriter, arguments, place, value
from amp_ir.capture.cell_loops.steps import stack
from amp_ir.capture.dead_code import drop_dead_code

aten = torch.ops.aten
_ASSIGN, _SELECT = aten.select_scatter.default, aten.select.int
# Fewer assignments stay as they are: each is one kernel.
_LEAST = 4


def merge_assignments(writer: GraphWriter) -> None:
    """Read what was assigned, and write chains of assignments as one concatenation.

    Before:  y1 = select_scatter(y0, a, 0, 0); y2 = select_scatter(y1, b, 0, 1)
             c = select(y2, 0, 0)
    After:   y2 = view(cat([a, b]), [2, n]); c = a

    So the gradients of the entries, each of which is read before the next one is cleared, are
    entries of one tensor.
    """
    for node in list(writer.graph.nodes):
        if node.target is _SELECT:
            _read_through(node)
    drop_dead_code(writer.graph)
    for node in reversed(list(writer.graph.nodes)):
        # The last assignment of a chain comes first: those before it are then unread.
        if node.target is _ASSIGN and node.users:
            _write_chain(writer, node)
            _drop_unread_chain(node)


def _axis_and_index(node: Node) -> tuple[int, int]:
    *_, axis, index = arguments(node)
    source = arguments(node)[0]
    shape = value(source).shape
    return axis % len(shape), index % shape[axis % len(shape)]


def _read_through(node: Node) -> None:
    """Let a read of an entry read what was assigned to it, or the tensor before the others were."""
    at = _axis_and_index(node)
    source = arguments(node)[0]
    while source.target is _ASSIGN:
        axis, index = _axis_and_index(source)
        if axis != at[0]:
            break
        before, assigned = arguments(source)[:2]
        if index == at[1]:
            if value(assigned).dtype == value(node).dtype:
                node.replace_all_uses_with(assigned)
            return
        source = before
    if source is not arguments(node)[0]:
        node.args = (source, *node.args[1:])


def _write_chain(writer: GraphWriter, last: Node) -> None:
    axis, _ = _axis_and_index(last)
    dtype = value(last).dtype
    assigned: dict[int, Node] = {}
    one = last
    while one.target is _ASSIGN and _axis_and_index(one)[0] == axis:
        before, part = arguments(one)[:2]
        if value(part).dtype != dtype or (one is not last and len(one.users) > 1):
            break
        assigned.setdefault(_axis_and_index(one)[1], part)
        one = before
    if len(assigned) < _LEAST:
        return
    writer.location = place(last)
    size = value(last).shape[axis]
    parts = []
    runs = itertools.groupby(range(size), key=lambda k: k in assigned)
    for is_assigned, indices in runs:
        run = list(indices)
        parts.append(_part(writer, one, assigned, axis, run, is_assigned=is_assigned))
    whole = parts[0] if len(parts) == 1 else writer.emit(aten.cat.default, parts, axis)
    last.replace_all_uses_with(whole)


def _part(
    writer: GraphWriter,
    before: Node,
    assigned: dict[int, Node],
    axis: int,
    run: Sequence[int],
    *,
    is_assigned: bool,
) -> Node:
    if not is_assigned:
        return writer.sliced(before, axis, run[0], run[-1] + 1)
    made = stack(writer, [assigned[k] for k in run])
    return writer.contiguous(writer.moved(made, 0, axis))


def _drop_unread_chain(node: Node) -> None:
    while node.target is _ASSIGN and not node.users:
        before = arguments(node)[0]
        node.graph.erase_node(node)
        node = before
