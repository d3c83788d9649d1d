# SPDX-License-Identifier: Apache-2.0
"""Write a loop into a captured graph, in place of the ops of its steps."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from amp_ir.capture.cell_loops.graph_writer import GraphWriter, place, value
from amp_ir.capture.rolled_loops.repeated_ops import (
    Carried,
    FromEntry,
    Inside,
    NotALoop,
    Outside,
    RepeatedOps,
    Source,
    reads,
    value_type,
)
from amp_ir.capture.rolled_loops.step_numbers import constant, dtype_of_number, with_tensor
from amp_ir.capture.rolled_loops.sums_of_products import sums_of_products, write_sum
from amp_ir.dialect.loop import CARRIED, ENTRY, WHOLE, Place
from amp_ir.ir.captured_loop import LOOP_KEY, CapturedLoop, run_loop
from amp_ir.ir.location import META_KEY
from amp_ir.ir.random_draws import DRAW_KEY

aten = torch.ops.aten
# Ops that cost nothing where they are, and that others fold in: each step does them again.
_FREE = frozenset(
    {
        aten.permute.default, aten.view.default, aten.expand.default, aten.unsqueeze.default,
        aten.squeeze.dims, aten.squeeze.dim, aten.select.int, aten.slice.Tensor, aten.full.default,
        aten.full_like.default, aten.scalar_tensor.default, aten.split_with_sizes.default,
        operator.getitem,
    }
)  # fmt: skip


def write_loop(writer: GraphWriter, ops: RepeatedOps) -> None:
    """Replace the ops of a loop's steps by one node; what reads them from outside reads its result.

    Before:  h1 = tanh(h0 + x[0]); h2 = tanh(h1 + x[1]); ...; y = cat([h1, h2, ...])
    After:   hs = run_loop([h0, x])         # body: (h, x) -> tanh(h + x)
             y = cat([hs[0], hs[1], ...])

    Raises:
        NotALoop: it cannot be written; the graph is as before.
    """
    _LoopWriter(writer, ops).run()


class _LoopWriter:
    def __init__(self, writer: GraphWriter, ops: RepeatedOps) -> None:
        self.writer, self.ops = writer, ops
        strides = [one.stride for one in self._all_entries()]
        # A loop that runs back in time writes its results in time, too.
        self.is_reverse = sum(one < 0 for one in strides) > len(strides) / 2
        self.draw_stride = self._draw_stride()
        self.constant = self._constant_positions()
        first, last = ops.begin, ops.begin + ops.length * ops.period
        self.members = set(ops.nodes[first:last])
        self.sums = sums_of_products(ops, self._users_outside, self.constant)
        self.body = torch.fx.Graph()
        self.placeholders: dict[Any, Node] = {}
        self.inputs: list[tuple[Callable[[], Node], Any]] = []
        self.made: dict[int, Node] = {}

    def _all_entries(self) -> list[FromEntry]:
        found = list(self.ops.entries.values())
        for one in self.ops.sources:
            found += [source for source in one or () if isinstance(source, FromEntry)]
        return found

    def _draw_stride(self) -> int:
        """Return by how much the index of a random op differs from that of the step before.

        Raises:
            NotALoop: it differs in several ways.
        """
        ops, strides = self.ops, set()
        for position in range(ops.period):
            nodes = [ops.node(step, position) for step in range(ops.length)]
            draws: list[int] = [one.meta[DRAW_KEY] for one in nodes if DRAW_KEY in one.meta]
            strides |= {after - before for before, after in itertools.pairwise(draws)}
        if len(strides) > 1:
            raise NotALoop("its steps draw random numbers in another order than they run in")
        return strides.pop() if strides else 0

    def _constant_positions(self) -> set[int]:
        """Return the positions of the ops that every step computes from the same values."""
        found: set[int] = set()
        for position, sources in enumerate(self.ops.sources):
            if sources is None or self._is_own(position):
                continue
            if all(
                isinstance(one, Outside) or (isinstance(one, Inside) and one.position in found)
                for one in sources
            ):
                found.add(position)
        return found

    def _is_own(self, position: int) -> bool:
        """Return whether steps compute different values of the same tensors."""
        is_random = DRAW_KEY in self.ops.node(0, position).meta
        return is_random or self.ops.numbers(position) is not None

    def run(self) -> None:
        ops = self.ops
        outputs = self._outputs()
        for position in outputs:
            value_type(ops.node(1, position))
        self._write_body(outputs)
        if not self.inputs:
            raise NotALoop("it reads nothing")
        for _, key in self.inputs:
            value_type(self.placeholders[key])
        self._emit(outputs)

    def _users_outside(self, step: int, position: int) -> list[Node]:
        return [one for one in self.ops.node(step, position).users if one not in self.members]

    def _outputs(self) -> dict[int, int]:
        """Return the positions of the values that leave a step, and what they are."""
        ops, found = self.ops, {}
        carried = {
            one.position
            for sources in ops.sources
            for one in sources or ()
            if isinstance(one, Carried)
        }
        if carried & self.constant:
            raise NotALoop("a step reads a constant of the step before")
        factors = [factor.source for one in self.sums.values() for factor in (one.left, one.right)]
        stored = {one.position for one in factors if isinstance(one, Inside)}
        for position in range(ops.period):
            if position in self.constant or position in ops.entries or position in self.sums:
                continue
            earlier = any(self._users_outside(j, position) for j in range(ops.length - 1))
            if earlier or position in stored:
                found[position] = ENTRY
            elif position in carried:
                found[position] = CARRIED
            elif self._users_outside(ops.length - 1, position):
                found[position] = WHOLE
        return found

    # The body.

    def _write_body(self, outputs: dict[int, int]) -> None:
        needed = self._needed(outputs)
        for position in sorted(needed):
            self._copy(position)
        self.body.output(tuple(self.made[position] for position in outputs))

    def _needed(self, outputs: dict[int, int]) -> set[int]:
        """Return the positions of the ops that the body's outputs need."""
        needed: set[int] = set()
        waiting = list(outputs)
        while waiting:
            position = waiting.pop()
            sources = self.ops.sources[position]
            if position in needed or sources is None or self._is_hoisted(position):
                continue
            needed.add(position)
            waiting += [one.position for one in sources if isinstance(one, Inside)]
        return needed

    def _is_hoisted(self, position: int) -> bool:
        return position in self.constant and self.ops.node(0, position).target not in _FREE

    def _copy(self, position: int) -> None:
        """Copy an op of a step into the body."""
        sources = iter(self.ops.sources[position] or ())
        node = self.ops.node(1, position)
        first = iter(reads(self.ops.node(0, position)))

        def now(_old: Node) -> Node:
            return self._value(next(sources), next(first))

        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), now)
        new = self.body.create_node(node.op, node.target, args, kwargs)
        numbers = self.ops.numbers(position)
        if numbers is not None:
            written, new = new, self._with_number(position, new, numbers)
            self.body.erase_node(written)
        new.meta.update(node.meta)
        if DRAW_KEY in node.meta:
            new.meta[DRAW_KEY] = self.ops.node(0, position).meta[DRAW_KEY]
        self.made[position] = new

    def _with_number(self, position: int, new: Node, numbers: Sequence[float | int]) -> Node:
        """Return a call that reads the step's number as an entry of a constant."""
        node = self.ops.node(1, position)
        dtype, device = dtype_of_number(node), value(node).device
        if dtype is None:
            raise NotALoop("a step has a number of its own in an op that takes it as a constant")
        with self.writer.mode:
            val = torch.empty((), dtype=dtype, device=device)
        entry = self._input(
            ("numbers", position), val, lambda: constant(self.writer, numbers, dtype, device)
        )
        return with_tensor(self.body, new, entry)

    def _value(self, source: Source, read_first: Node) -> Node:
        """Return the body's value of what an op reads; the first step reads `read_first`."""
        ops = self.ops
        if isinstance(source, Inside):
            entry = ops.entries.get(source.position)
            if entry is not None:
                return self._entry(entry, ops.node(0, source.position))
            if self._is_hoisted(source.position):
                return self._whole(ops.node(0, source.position))
            return self.made[source.position]
        if isinstance(source, Outside):
            return self._whole(source.node)
        if isinstance(source, FromEntry):
            return self._entry(source, read_first)
        key = ("carried", source.position, read_first)
        return self._input(key, value(read_first), lambda: read_first)

    def _whole(self, node: Node) -> Node:
        return self._input(("whole", node), node.meta["val"], lambda: node)

    def _entry(self, source: FromEntry, like: Node) -> Node:
        one = source.first
        key = ("entry", one.whole, one.axis, one.width, one.index, source.stride)
        return self._input(key, value(like), lambda: self._stacked(source))

    def _stacked(self, source: FromEntry) -> Node:
        """Return the tensor of all entries; of integers, which may be indices, no others."""
        whole = source.first.stacked(self.writer)
        return whole if value(whole).is_floating_point() else self._those_read(whole, source)

    def _those_read(self, whole: Node, source: FromEntry) -> Node:
        """Return the entries that the steps read, in the order of the tensor."""
        first, stride = source.first.index, source.stride
        last = first + stride * (self.ops.length - 1)
        begin, end = min(first, last), max(first, last) + 1
        return self.writer.contiguous(self.writer.sliced(whole, 0, begin, end, abs(stride)))

    def _input(self, key: Any, val: Any, operand: Callable[[], Node]) -> Node:
        if key not in self.placeholders:
            start = next(iter(self.body.nodes), None)
            context = self.body.inserting_before(self._first_op()) if start else None
            if context is None:
                node = self.body.placeholder(f"input{len(self.inputs)}")
            else:
                with context:
                    node = self.body.placeholder(f"input{len(self.inputs)}")
            node.meta["val"] = val
            self.placeholders[key] = node
            self.inputs.append((operand, key))
        return self.placeholders[key]

    def _first_op(self) -> Node:
        nodes = list(self.body.nodes)
        found = next((one for one in nodes if one.op != "placeholder"), None)
        return self.body._root if found is None else found

    # The graph around it.

    def _emit(self, outputs: dict[int, int]) -> None:
        ops, writer = self.ops, self.writer
        numbers = {position: k for k, position in enumerate(outputs)}
        writer.location = place(ops.node(0, next(iter(outputs))))
        operands, places = [], []
        for operand, key in self.inputs:
            operands.append(operand())
            places.append(self._place_of(key, numbers))
        out_places: list[Place] = [
            (ENTRY, ops.length - 1, -1)
            if kind == ENTRY and self.is_reverse
            else (ENTRY, 0, 1)
            if kind == ENTRY
            else (kind, 0, 0)
            for kind in outputs.values()
        ]
        with writer.graph.inserting_before(writer.end):
            loop = writer.graph.call_function(run_loop, (operands,))
        results = []
        for position, kind in outputs.items():
            one = value(ops.node(1, position))
            shape = [ops.length, *one.shape] if kind == ENTRY else list(one.shape)
            with writer.mode:
                results.append(torch.empty(shape, dtype=one.dtype, device=one.device))
        module = torch.fx.GraphModule(torch.nn.Module(), self.body)
        loop.meta["val"] = tuple(results)
        loop.meta[META_KEY] = writer.location
        loop.meta[LOOP_KEY] = CapturedLoop(
            module, ops.length, tuple(places), tuple(out_places), self.draw_stride
        )
        self._replace(loop, outputs)

    def _place_of(self, key: Any, numbers: dict[int, int]) -> Place:
        if key[0] == "whole":
            return (WHOLE, 0, 0)
        if key[0] == "carried":
            return (CARRIED, numbers[key[1]], 0)
        if key[0] == "numbers":
            return (ENTRY, 0, 1)
        _, whole, _, _, first, stride = key
        if value(whole).is_floating_point():
            return (ENTRY, first, stride)
        return (ENTRY, 0, 1) if stride > 0 else (ENTRY, self.ops.length - 1, -1)

    def _replace(self, loop: Node, outputs: dict[int, int]) -> None:
        """Let what reads a step's values from outside read the loop's results."""
        ops, writer = self.ops, self.writer
        results: dict[int, Node] = {}
        for k, (position, kind) in enumerate(outputs.items()):
            result = results[position] = writer.emit(operator.getitem, loop, k)
            one: Node | None = None
            for step in range(ops.length):
                users = self._users_outside(step, position)
                if not users:
                    continue
                index = ops.length - 1 - step if self.is_reverse else step
                writer.location = place(ops.node(step, position))
                one = writer.entry(result, index, one) if kind == ENTRY else result
                _replace_in(ops.node(step, position), one, set(users))
        for position, product in self.sums.items():
            total = write_sum(writer, ops, product, lambda source: self._in_time(source, results))
            last = ops.length - 1
            users = self._users_outside(last, position)
            _replace_in(ops.node(last, position), total, set(users))
        for position in self.constant:
            same = ops.node(0, position)
            for step in range(1, ops.length):
                _replace_in(
                    ops.node(step, position), same, set(self._users_outside(step, position))
                )

    def _in_time(self, source: Inside | FromEntry, results: dict[int, Node]) -> Node:
        """Return all steps' values, as the loop's results have them."""
        if isinstance(source, Inside):
            return results[source.position]
        read = self._those_read(source.first.stacked(self.writer), source)
        is_backwards = (source.stride < 0) != self.is_reverse
        return self.writer.emit(aten.flip.default, read, [0]) if is_backwards else read


def _replace_in(old: Node, new: Node, users: set[Node]) -> None:
    if users:
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user in users)
