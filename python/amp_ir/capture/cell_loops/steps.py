# SPDX-License-Identifier: Apache-2.0
"""Values of time steps: which tensor they are parts of, and one tensor of all of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import torch
from torch.fx import Node

from amp_ir.capture.cell_loops.graph_writer import GraphWriter, arguments, value

aten = torch.ops.aten


@attrs.frozen
class Step:
    """The entry `index` of `whole` along `axis`, an axis that the entry lacks."""

    whole: Node
    axis: int
    index: int


def step_of(node: Node) -> Step | None:
    """Return what a node is an entry of; None where it is something else."""
    if node.target is aten.select.int:
        whole, axis, index = arguments(node)
        shape = value(whole).shape
        return Step(_unsliced(whole), axis % len(shape), index % shape[axis])
    if node.target not in (aten.squeeze.dims, aten.squeeze.dim):
        return None
    part, axes = arguments(node)
    if part.target is not aten.slice.Tensor or value(part).dim() != value(node).dim() + 1:
        return None
    whole, axis, begin, _end, step = arguments(part, None, 0, None, None, 1)
    shape = value(whole).shape
    axis %= len(shape)
    begin = 0 if begin is None else begin
    squeezed = [one % len(shape) for one in ([axes] if isinstance(axes, int) else axes)]
    if squeezed != [axis] or step != 1 or not 0 <= begin < shape[axis]:
        return None
    return Step(_unsliced(whole), axis, begin) if value(part).shape[axis] == 1 else None


def _unsliced(whole: Node) -> Node:
    """Return the tensor of which `whole` is all: `x[:, t]` slices the first axis first."""
    while whole.target is aten.slice.Tensor:
        source, *_, step = arguments(whole, None, 0, None, None, 1)
        if step != 1 or value(source).shape != value(whole).shape:
            break
        whole = source
    return whole


def is_zero(node: Node) -> bool:
    """Return whether a tensor is known to be 0 everywhere."""
    filled = node.target in (aten.full.default, aten.full_like.default)
    return filled and bool(arguments(node)[1] == 0)


def is_descending(nodes: Sequence[Node]) -> bool:
    """Return whether these are entries of one tensor, the last one first."""
    steps = [step_of(node) for node in nodes]
    return len(nodes) > 1 and _indices(steps[::-1]) is not None


def _indices(steps: Sequence[Step | None]) -> range | None:
    """Return the indices of consecutive entries of one tensor; None for anything else."""
    if not steps or any(one is None for one in steps):
        return None
    known = [one for one in steps if one is not None]
    first = known[0]
    if any((one.whole, one.axis) != (first.whole, first.axis) for one in known):
        return None
    if any(one.index + 1 != other.index for one, other in itertools.pairwise(known)):
        return None
    return range(first.index, first.index + len(known))


def existing_stack(writer: GraphWriter, nodes: Sequence[Node]) -> Node | None:
    """Return the tensor [t, ...] of consecutive entries of one tensor; None for anything else."""
    steps = [step_of(node) for node in nodes]
    indices = _indices(steps)
    if indices is None:
        return None
    first = steps[0]
    assert first is not None
    part = writer.sliced(first.whole, first.axis, indices.start, indices.stop)
    return writer.moved(part, first.axis, 0)


def stack(writer: GraphWriter, nodes: Sequence[Node]) -> Node:
    """Return the tensor [t, ...] of the values of all steps."""
    whole = existing_stack(writer, nodes)
    if whole is not None:
        return whole
    shape = (len(nodes), *value(nodes[0]).shape)
    if len(set(nodes)) == 1:
        return writer.emit(
            aten.expand.default, writer.emit(aten.unsqueeze.default, nodes[0], 0), list(shape)
        )
    if not value(nodes[0]).shape:
        nodes = [writer.emit(aten.unsqueeze.default, one, 0) for one in nodes]
    return writer.view(writer.emit(aten.cat.default, list(nodes), 0), shape)
