# SPDX-License-Identifier: Apache-2.0
"""The backward op of a recurrent layer, instead of the gradients of a chain of cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch
from torch.fx import Node

from amp_ir.capture.cell_loops.cells import CellGradient
from amp_ir.capture.cell_loops.graph_writer import GraphWriter, place, value
from amp_ir.capture.cell_loops.layer import Layer
from amp_ir.capture.cell_loops.steps import existing_stack, is_zero, stack, step_of
from amp_ir.capture.cell_loops.sums import terms_of, totals_of, without_term
from amp_ir.capture.decompositions.cell_ops import GRU, LSTM
from amp_ir.capture.decompositions.recurrent_ops import wide
from amp_ir.dialect.recurrence import previous_slice

aten = torch.ops.aten


@attrs.frozen(eq=False)
class Link:
    """The gradient of a cell, and that of the next cell, which it continues.

    `passed` is the gradient of the hidden state that it gets from there; both are None for one that
    begins.
    """

    gradient: CellGradient
    later: CellGradient | None = None
    passed: Node | None = None

    @property
    def terms(self) -> list[Node]:
        """The gradients of the cell's new hidden state from elsewhere."""
        return [one for one in terms_of(self.gradient.above[0]) if one is not self.passed]

    @property
    def reads(self) -> list[Node]:
        """All that the gradient is computed from, but for what it gets from the next cell."""
        above = self.gradient.above
        others = self.gradient.node.args[len(above) :]
        read = [one for one in others if isinstance(one, Node)]
        return [*self.terms, *read, *(above[1:] if self.later is None else [])]


def link_of(gradient: CellGradient, later: Mapping[Node, CellGradient]) -> Link:
    """Find the gradient of the next cell, whose gradients of states only this one reads.

    `later` maps the gradients of the hidden state that may be passed on to whose they are.
    """
    total, *of_cell = gradient.above
    passed = next((one for one in terms_of(total) if one in later), None)
    if passed is None or len(passed.users) != 1:
        return Link(gradient)
    source = later[passed]
    if of_cell and source.of_state(1) is not of_cell[0]:
        return Link(gradient)
    is_alone = all(list(one.users) == [gradient.node] for one in (total, *of_cell))
    return Link(gradient, source, passed) if is_alone else Link(gradient)


def runs(links: Mapping[Node, Link]) -> Iterator[list[Link]]:
    """Yield the links in which each one continues the one before."""
    earlier = {one.later.node: one for one in links.values() if one.later is not None}
    for link in links.values():
        if link.later is None:
            run = [link]
            while run[-1].gradient.node in earlier:
                run.append(earlier[run[-1].gradient.node])
            yield run


def write_gradient(
    writer: GraphWriter, layer: Layer, run: Sequence[Link], positions: Mapping[Node, int]
) -> None:
    """Replace the gradients of consecutive cells, the last one first, by one of a layer.

    `positions` are those of the cells in the layer's chain.
    """
    first = run[0].gradient
    writer.location = place(first.node)
    last = positions[first.cell.node]
    times = layer.times(last + 1 - len(run), last + 1)
    in_time = list(run) if layer.is_reverse else list(run[::-1])
    grad, hidden = _above(writer, in_time, run[0])
    dtype, kind = layer.dtype, layer.kind
    above = [writer.cast(grad, dtype), writer.cast(hidden, dtype)]
    above += [writer.cast(one, wide(dtype)) for one in first.above[1:]]
    saved = _saved(writer, layer, times)
    of_gates, *others = writer.results(
        getattr(torch.ops.amp_ir, f"{kind.name}_backward").default,
        *above, *saved, layer.of_state, layer.is_reverse,
    )  # fmt: skip
    of_recurrent = others.pop(0) if kind is GRU else of_gates
    end = run[-1].gradient
    for k, made in enumerate(others):
        _replace(writer, end.of_state(k), made)
    parts = _Parts(writer, layer, times, of_gates, of_recurrent)
    parts.replace_inputs([one.gradient for one in in_time])
    for k in range(4):
        parts.replace_param(k, [one.gradient for one in in_time])


def _saved(writer: GraphWriter, layer: Layer, times: range) -> list[Node]:
    """Return what the backward op reads of the forward op's results, for these steps."""
    states, *others = layer.results
    if layer.kind is LSTM:
        states, activated = others
        saved = [activated]
    else:
        saved = others
    cut = [writer.sliced(one, 0, times.start, times.stop) for one in saved]
    return [*cut, writer.sliced(states, 0, times.start, times.stop + 1)]


def _above(writer: GraphWriter, in_time: Sequence[Link], first: Link) -> tuple[Node, Node]:
    """Return the gradients of all steps' states [t, n, h], and of the last state [n, h]."""
    columns, rest = _columns(in_time)
    like = value(first.gradient.above[0])
    total: Node | None = None
    hidden: Node | None = None
    for column in columns:
        part = existing_stack(writer, column)
        assert part is not None
        total = part if total is None else writer.emit(aten.add.Tensor, total, part)
    at_first = [one is first for one in in_time]
    sums = [_sum(writer, terms) for terms in rest]
    if any(one is not None for one, here in zip(sums, at_first, strict=True) if not here):
        nothing = writer.zeros(like.shape, like)
        part = stack(writer, [nothing if one is None else one for one in sums])
        total = part if total is None else writer.emit(aten.add.Tensor, total, part)
    else:
        hidden = sums[at_first.index(True)]
    total = writer.zeros((len(in_time), *like.shape), like) if total is None else total
    return total, writer.zeros(like.shape, like) if hidden is None else hidden


def _columns(in_time: Sequence[Link]) -> tuple[list[list[Node]], list[list[Node]]]:
    """Split the terms into entries of one tensor, one for each step, and the rest by step."""
    rest = [[one for one in link.terms if not is_zero(one)] for link in in_time]
    # By tensor, and by time; an entry that a step adds twice is in its column once.
    columns: dict[object, dict[int, Node]] = {}
    for time, terms in enumerate(rest):
        for one in terms:
            step = step_of(one)
            if step is not None:
                key = (step.whole, step.axis, step.index - time)
                columns.setdefault(key, {}).setdefault(time, one)
    whole = [list(column.values()) for column in columns.values() if len(column) == len(rest)]
    for column in whole:
        for terms, one in zip(rest, column, strict=True):
            terms.remove(one)
    return whole, rest


def _sum(writer: GraphWriter, terms: Sequence[Node]) -> Node | None:
    total: Node | None = None
    for one in terms:
        total = one if total is None else writer.emit(aten.add.Tensor, total, one)
    return total


def _replace(writer: GraphWriter, old: Node | None, new: Node) -> None:
    if old is not None and old.users:
        old.replace_all_uses_with(writer.cast(new, value(old).dtype))


@attrs.frozen(eq=False)
class _Parts:
    """The gradients of a layer's inputs and parameters, by those of its gates."""

    writer: GraphWriter
    layer: Layer
    times: range
    of_gates: Node
    of_recurrent: Node

    def replace_inputs(self, in_time: Sequence[CellGradient]) -> None:
        """Let readers of each cell's gradient of x read a part of the layer's."""
        read = [(k, one.results[0]) for k, one in enumerate(in_time) if 0 in one.results]
        if not read:
            return
        writer = self.writer
        x = value(read[0][1])
        flat = self._flat(self.of_gates)
        product = writer.emit(aten.mm.default, flat, self.layer.of_input)
        whole = writer.cast(writer.view(product, [len(self.times), *x.shape]), x.dtype)
        for k, one in read:
            one.replace_all_uses_with(writer.emit(aten.select.int, whole, 0, k))

    def replace_param(self, k: int, in_time: Sequence[CellGradient]) -> None:
        """Let the sum of the cells' gradients of the k-th parameter be the layer's."""
        steps = {}
        for time, one in enumerate(in_time):
            found = one.of_param(k)
            if found is not None and found.users:
                steps[found] = time
        for _total, members in list(totals_of(steps)):
            if len(members) == len(in_time):
                parts = [(members, range(len(in_time)))]
            else:
                parts = [([one], range(steps[one], steps[one] + 1)) for one in members]
            for terms, times in parts:
                first, *others = terms
                for other in others:
                    without_term(self.writer.graph, other)
                _replace(self.writer, first, self._param(k, times))

    def _param(self, k: int, times: range) -> Node:
        """Return the gradient of the k-th parameter by a range of this gradient's steps."""
        gates = self._flat(self.of_recurrent if k % 2 else self.of_gates, times)
        if k >= 2:
            return self.writer.emit(aten.sum.dim_IntList, gates, [0])
        begin = self.times.start + times.start
        there = range(begin, begin + len(times))
        other = self._previous_states(there) if k else self._inputs(there)
        return self.writer.emit(aten.mm.default, self.writer.transposed(gates), other)

    def _inputs(self, times: range) -> Node:
        rows = value(self.layer.results[0]).shape[1]
        return self.writer.sliced(self.layer.inputs, 0, times.start * rows, times.stop * rows)

    def _previous_states(self, times: range) -> Node:
        offset = previous_slice(reverse=self.layer.is_reverse).start
        part = self.writer.sliced(
            self.layer.results[0], 0, times.start + offset, times.stop + offset
        )
        return self._flat(part)

    def _flat(self, node: Node, times: range | None = None) -> Node:
        if times is not None:
            node = self.writer.sliced(node, 0, times.start, times.stop)
        steps, rows, width = value(node).shape
        return self.writer.view(node, [steps * rows, width])
