# SPDX-License-Identifier: Apache-2.0
"""Entries of tensors that the steps of a loop read: `x[:, t]`, and `x[:, t * n : (t + 1) * n]`."""

from __future__ import annotations

import operator

import attrs
import torch
from torch.fx import Node

from amp_ir.capture.cell_loops.graph_writer import GraphWriter, arguments, value
from amp_ir.capture.cell_loops.steps import step_of

aten = torch.ops.aten


@attrs.frozen
class Entry:
    """The entry `index` of an axis of `whole`; with `width`: that of its parts of this width."""

    whole: Node
    axis: int
    index: int
    width: int | None = None

    def is_next(self, other: Entry, stride: int) -> bool:
        """Return whether `other` is the entry `stride` after this one."""
        return other == attrs.evolve(self, index=self.index + stride)

    def stacked(self, writer: GraphWriter) -> Node:
        """Return the tensor whose first axis counts these entries, and others of the tensor."""
        whole, axis = self.whole, self.axis
        if self.width is not None:
            shape = list(value(whole).shape)
            shape[axis : axis + 1] = [shape[axis] // self.width, self.width]
            whole = writer.view(whole, shape)
        return writer.contiguous(writer.moved(whole, axis, 0))


def entry_of(node: Node) -> Entry | None:
    """Return what a node is an entry of; None where it is something else."""
    step = step_of(node)
    if step is not None:
        return Entry(step.whole, step.axis, step.index)
    if node.target is operator.getitem:
        return _part_of_split(node)
    if node.target is not aten.slice.Tensor:
        return None
    whole, axis, begin, _end, stride = arguments(node, None, 0, None, None, 1)
    shape = value(whole).shape
    axis %= len(shape)
    width = value(node).shape[axis]
    begin = 0 if begin is None else begin
    begin = begin + shape[axis] if begin < 0 else begin
    if stride != 1 or not width or begin % width or shape[axis] % width:
        return None
    return Entry(whole, axis, begin // width, width)


def _part_of_split(node: Node) -> Entry | None:
    """Return which of the parts of a tensor, all of one width, a node is."""
    split, index = node.args
    if not isinstance(split, Node) or split.target is not aten.split_with_sizes.default:
        return None
    whole, sizes, axis = arguments(split, None, None, 0)
    if len(set(sizes)) != 1 or not isinstance(index, int):
        return None
    return Entry(whole, axis % value(whole).dim(), index % len(sizes), sizes[0])
