# SPDX-License-Identifier: Apache-2.0
"""What each op of a repeated range reads: of its own step, the step before, or from outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch
from torch.fx import Node

from amp_ir.capture.cell_loops.graph_writer import value
from amp_ir.capture.rolled_loops.entries import Entry, entry_of
from amp_ir.capture.rolled_loops.repeats import LEAST_STEPS, why_no_loop_holds
from amp_ir.capture.rolled_loops.step_numbers import step_number

aten = torch.ops.aten


@attrs.frozen
class Inside:
    """The value of an op of the same step, by its position."""

    position: int


@attrs.frozen
class Carried:
    """The value of an op of the step before, by its position."""

    position: int


@attrs.frozen
class Outside:
    """A value from before the loop, the same for every step."""

    node: Node


@attrs.frozen
class FromEntry:
    """An entry of a tensor: that of the first step, and how many entries the next one is after."""

    first: Entry
    stride: int


Source = Inside | Carried | Outside | FromEntry


class NotALoop(Exception):  # noqa: N818 (it says what was found)
    """A repeated range is not a loop; `str(error)` says why."""


@attrs.define(eq=False)
class RepeatedOps:
    """A loop: `length` steps of `period` ops from `nodes[begin]` on, and what each op reads.

    `sources[i]` are those of the tensors that op i reads, in order; None for an op that is an entry
    of a tensor from outside itself, in `entries`.
    """

    nodes: Sequence[Node]
    begin: int
    period: int
    length: int
    sources: list[list[Source] | None]
    entries: dict[int, FromEntry]

    def node(self, step: int, position: int) -> Node:
        """Return an op of a step."""
        return self.nodes[self.begin + step * self.period + position]

    def numbers(self, position: int) -> list[float | int] | None:
        """Return the numbers of an op in all steps where they differ; else None."""
        found = [step_number(self.node(step, position)) for step in range(self.length)]
        known = [one for one in found if one is not None]
        differ = len({repr(one) for one in known}) > 1
        return known if differ else None


def reads(node: Node) -> list[Node]:
    """Return the nodes that a node reads, in order, as often as it does."""
    found: list[Node] = []
    torch.fx.map_arg((node.args, node.kwargs), found.append)
    return found


def repeated_ops(
    nodes: Sequence[Node], index: dict[Node, int], begin: int, period: int, count: int
) -> RepeatedOps:
    """Find the steps, among `count` from `begin` on, that are one loop.

    Requires: their ops are equal, period by period; `index` has each of `nodes`.

    Raises:
        NotALoop: fewer than `LEAST_STEPS` of them are.
    """
    return _Reader(nodes, index, begin, period, count).run()


class _Reader:
    def __init__(
        self, nodes: Sequence[Node], index: dict[Node, int], begin: int, period: int, count: int
    ) -> None:
        self.nodes, self.index, self.begin, self.period = nodes, index, begin, period
        self.low, self.high, self.middle = 0, count, count // 2
        self.entries: dict[int, FromEntry] = {}

    def run(self) -> RepeatedOps:
        for position in range(self.period):
            reason = why_no_loop_holds(self.node(self.middle, position))
            if reason:
                raise NotALoop(reason)
        self._find_entries()
        sources = [
            None if position in self.entries else self._sources(position)
            for position in range(self.period)
        ]
        # Where an end was given up for one op, the others begin later, too.
        low = self.low
        for position, entry in self.entries.items():
            first = attrs.evolve(entry.first, index=entry.first.index + low * entry.stride)
            self.entries[position] = attrs.evolve(entry, first=first)
        found: list[list[Source] | None] = []
        for one in sources:
            found.append(None if one is None else [self._from(source) for source in one])
        return RepeatedOps(
            self.nodes,
            self.begin + low * self.period,
            self.period,
            self.high - low,
            found,
            self.entries,
        )

    def _from(self, source: Source) -> Source:
        """Return the source by the steps that are left."""
        if not isinstance(source, FromEntry):
            return source
        index = source.first.index + self.low * source.stride
        return attrs.evolve(source, first=attrs.evolve(source.first, index=index))

    def node(self, step: int, position: int) -> Node:
        return self.nodes[self.begin + step * self.period + position]

    def _keep(self, holds: Callable[[int], bool], *, is_carried: bool = False) -> None:
        """Keep the steps around the middle for which something holds.

        The first step that is kept need not continue from one before it.
        """
        if not self.low <= self.middle < self.high:
            self.middle = (self.low + self.high) // 2
        low = high = self.middle
        while high < self.high and holds(high):
            high += 1
        while low > self.low and holds(low - 1):
            low -= 1
        if is_carried and low > self.low:
            low -= 1
        self.low, self.high = low, high
        if high - low < LEAST_STEPS:
            raise NotALoop("too few steps are alike")
        # Steps before and after the middle one are looked at, too.
        self.middle = (low + high) // 2

    def _find_entries(self) -> None:
        """Find the ops that are another entry of a tensor from outside at each step."""
        for position in range(self.period):
            here, after = self.node(self.middle, position), self.node(self.middle + 1, position)
            if here.target not in (aten.select.int, aten.slice.Tensor):
                continue
            if here.args[1:] == after.args[1:]:
                self._keep(lambda j, p=position, w=here: self.node(j, p).args[1:] == w.args[1:])  # type: ignore[misc]
                continue
            self.entries[position] = self._entries([self.node(j, position) for j in self._steps()])

    def _steps(self) -> range:
        return range(self.low, self.high)

    def _entries(self, parts: Sequence[Node]) -> FromEntry:
        """Return the entries that these are, one for each step that is left."""
        found = {step: entry_of(one) for step, one in zip(self._steps(), parts, strict=True)}
        here, after = found[self.middle], found[self.middle + 1]
        if here is None or after is None:
            raise NotALoop("a step reads what no tensor has as its entry")
        stride = after.index - here.index
        whole = self.index.get(here.whole)
        if not stride or (whole is not None and whole >= self.begin):
            raise NotALoop("a step reads an entry of what the loop makes")
        at_first = attrs.evolve(here, index=here.index - self.middle * stride)

        def holds(step: int) -> bool:
            return found[step] == attrs.evolve(at_first, index=at_first.index + step * stride)

        self._keep(holds)
        return FromEntry(at_first, stride)

    def _sources(self, position: int) -> list[Source]:
        read = {step: reads(self.node(step, position)) for step in self._steps()}
        count = len(read[self.middle])
        if any(len(one) != count for one in read.values()):
            raise NotALoop("ops read different numbers of tensors")
        return [
            self._source(
                {step: one[k] for step, one in read.items() if self.low <= step < self.high}
            )
            for k in range(count)
        ]

    def _source(self, read: dict[int, Node]) -> Source:
        """Return what the steps read, each one node."""
        here = read[self.middle]
        if here is read[self.middle + 1] and here is read[self.middle - 1]:
            self._keep(lambda step: read[step] is here)
            at = self.index.get(here)
            if at is not None and at >= self.begin + self.low * self.period:
                # Made by an early step: the loop begins after it.
                self.low = (at - self.begin) // self.period + 1
                self._keep(lambda _step: True)
            return Outside(here)
        at = self.index.get(here, -1) - self.begin
        step, position = divmod(at, self.period)
        if at >= 0 and position not in self.entries:
            distance = self.middle - step
            if distance == 0:
                self._keep(lambda j: read[j] is self.node(j, position))
                return Inside(position)
            if distance != 1:
                raise NotALoop("a step reads what a step before the last one made")
            made = value_type(self.node(self.middle, position))
            self._keep(lambda j: j > 0 and read[j] is self.node(j - 1, position), is_carried=True)
            first = self.index.get(read[self.low], -1)
            is_inside = first >= self.begin + self.low * self.period
            if is_inside or value_type(read[self.low]) != made:
                self.low += 1
                self._keep(lambda _step: True)
            return Carried(position)
        return self._entries([read[step] for step in self._steps()])


def value_type(node: Node) -> tuple[torch.dtype, tuple[int, ...], torch.device]:
    """Return dtype, shape and device of a node that is one tensor.

    Raises:
        NotALoop: it is several.
    """
    if not isinstance(node.meta["val"], torch.Tensor):
        raise NotALoop("several results of an op leave a step at once")
    one = value(node)
    return one.dtype, tuple(one.shape), one.device
