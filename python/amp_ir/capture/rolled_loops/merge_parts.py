# SPDX-License-Identifier: Apache-2.0
"""Concatenations of consecutive entries of one tensor among other parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from amp_ir.capture.cell_loops.graph_writer import GraphWriter, arguments, place, value
from amp_ir.capture.cell_loops.steps import Step, step_of

aten = torch.ops.aten
_LEAST_ENTRIES = 4


def merge_parts(writer: GraphWriter) -> None:
    """Replace entries of one tensor that a concatenation has side by side by a part of it.

    Before:  y = cat([a, x[1], x[2], x[3], x[4], b], 1)
    After:   y = cat([a, view(permute(x[1:5], ...), ...), b], 1)
    """
    for node in list(writer.graph.nodes):
        if node.target is not aten.cat.default:
            continue
        given, axis = arguments(node, None, 0)
        axis %= value(node).dim()
        writer.location = place(node)
        parts = _merged(writer, list(given), axis)
        if len(parts) < len(given):
            node.args = (parts, axis)


def _merged(writer: GraphWriter, given: Sequence[Node], axis: int) -> list[Node]:
    parts: list[Node] = []
    at = 0
    while at < len(given):
        run = _run(given, at, axis)
        if len(run) < _LEAST_ENTRIES:
            parts.append(given[at])
            at += 1
            continue
        parts.append(_joined(writer, run, given[at : at + len(run)], axis))
        at += len(run)
    return parts


def _run(given: Sequence[Node], begin: int, axis: int) -> list[Step]:
    """Return the entries, each `stride` after the one before it, that begin here."""
    found: list[Step] = []
    for node in given[begin:]:
        one = _entry(node, axis)
        if one is None or (found and (one.whole, one.axis) != (found[0].whole, found[0].axis)):
            break
        if found and abs(one.index - found[-1].index) != 1:
            break
        if len(found) > 1 and one.index - found[-1].index != found[1].index - found[0].index:
            break
        found.append(one)
    return found


def _entry(node: Node, axis: int) -> Step | None:
    """Return the entry that a part of a concatenation is, with or without an axis of its own."""
    if node.target is aten.unsqueeze.default:
        source, at = arguments(node)
        return step_of(source) if at % value(node).dim() == axis else None
    return step_of(node)


def _joined(writer: GraphWriter, run: Sequence[Step], parts: Sequence[Node], axis: int) -> Node:
    """Return what the parts are together."""
    first, last = run[0], run[-1]
    low, high = min(first.index, last.index), max(first.index, last.index) + 1
    whole = writer.sliced(first.whole, first.axis, low, high)
    if first.index > last.index:
        whole = writer.emit(aten.flip.default, whole, [first.axis])
    moved = writer.moved(whole, first.axis, axis)
    shape = list(value(parts[0]).shape)
    shape[axis] = sum(value(one).shape[axis] for one in parts)
    return writer.view(writer.contiguous(moved), shape)
