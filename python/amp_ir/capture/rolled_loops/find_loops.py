# SPDX-License-Identifier: Apache-2.0
"""Loops over time steps become loops again: a graph's size then does not depend on their number.

A loop that a user writes in Python is unrolled in a captured graph, and so is its backward pass.
Where at least 16 periods of ops are alike, and each period reads only values of its own, of the
period before, values from before the loop, or the next entry of a tensor, they are one loop.
"""

from __future__ import annotations

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from amp_ir.capture.cell_loops.graph_writer import GraphWriter, place
from amp_ir.capture.cell_loops.merge_steps import merge_stacks
from amp_ir.capture.dead_code import drop_dead_code
from amp_ir.capture.rolled_loops.repeats import LEAST_STEPS, Range, Signatures, ranges

# How many beginnings of a period are tried, those with the fewest carried values first.
_MOST_BEGINNINGS = 4
# Loops of fewer ops are compiled soon enough without a note.
_LEAST_OPS_TO_NOTE = 256


def find_loops(
    module: torch.fx.GraphModule, mode: FakeTensorMode, *, why_not: str = ""
) -> tuple[str, ...]:
    """Replace repeated ops by loops; return a note on each long loop that stays unrolled.

    Before:  h1 = tanh(h0 + x[0]); h2 = tanh(h1 + x[1]); ...; y = cat([h1, h2, ...])
    After:   hs = run_loop([h0, x]); y = hs       # its body: (h, x) -> tanh(h + x)

    `why_not` says why this step has to stay as it is; "" where it has not.

    Requires: a functional graph without dead code.
    Ensures:  the same values. Steps that differ from the others stay as they are.
    """
    search = _Search(module.graph, mode, why_not)
    has_loops = False
    while search.write_one():
        has_loops = True
    if has_loops:
        from amp_ir.capture.rolled_loops.merge_parts import merge_parts

        writer = GraphWriter(module.graph, mode)
        merge_stacks(writer)
        merge_parts(writer)
        writer.sort()
        drop_dead_code(module.graph)
    return search.notes()


@attrs.frozen(eq=False)
class _Failed:
    """Ops that repeat after `period` ones, and why they are no loop."""

    nodes: list[Node]
    period: int
    reason: str


class _Search:
    def __init__(self, graph: torch.fx.Graph, mode: FakeTensorMode, why_not: str) -> None:
        self.graph, self.mode, self.why_not = graph, mode, why_not
        self.signatures = Signatures()
        self.failed: dict[tuple[Node, int], _Failed] = {}

    def write_one(self) -> bool:
        """Write the first loop that there is; return whether there was one."""
        nodes = [node for node in self.graph.nodes if node.op == "call_function"]
        if len(nodes) < 3 * LEAST_STEPS:
            return False
        index = {node: k for k, node in enumerate(nodes)}
        for found in ranges(self.signatures.of(nodes)):
            key = (nodes[found.begin], found.period)
            if key in self.failed:
                continue
            reason = self.why_not or self._write(nodes, index, found)
            if not reason:
                # Others may read entries of its results now, where they read ops of its steps.
                self.failed.clear()
                return True
            self.failed[key] = _Failed(nodes[found.begin : found.end], found.period, reason)
        return False

    def _write(self, nodes: list[Node], index: dict[Node, int], found: Range) -> str:
        """Write the loop that a range is; return why it is none, or ""."""
        # On demand: in most graphs nothing repeats often enough.
        from amp_ir.capture.rolled_loops.repeated_ops import NotALoop, repeated_ops
        from amp_ir.capture.rolled_loops.write_loop import write_loop

        reason = ""
        for begin in _beginnings(nodes, index, found):
            count = (found.end - begin) // found.period
            try:
                ops = repeated_ops(nodes, index, begin, found.period, count)
                writer = GraphWriter(self.graph, self.mode)
                write_loop(writer, ops)
            except NotALoop as error:
                reason = reason or str(error)
                continue
            writer.sort()
            drop_dead_code(self.graph)
            return ""
        return reason or "its steps cannot be told apart"

    def notes(self) -> tuple[str, ...]:
        """Return a note on each loop that stays unrolled: one for its forward and backward pass."""
        left = set(self.graph.nodes)
        noted: set[Node] = set()
        found: dict[tuple[str, str], str] = {}
        for one in sorted(self.failed.values(), key=lambda one: -len(one.nodes)):
            nodes = [node for node in one.nodes if node in left and node not in noted]
            if len(nodes) < max(_LEAST_OPS_TO_NOTE, LEAST_STEPS * one.period):
                continue
            noted.update(nodes)
            where = place(one.nodes[0])
            found.setdefault(
                (where.module, one.reason),
                f"some {len(nodes) // one.period} steps of a loop in {where} are compiled one by "
                f"one, which takes long, since {one.reason}",
            )
        return tuple(found.values())


def _beginnings(nodes: list[Node], index: dict[Node, int], found: Range) -> list[int]:
    """Return where the first period may begin, best first: the fewer bytes cross, the better."""
    period = found.period
    middle = found.begin + (found.end - found.begin) // period // 2 * period
    crossing: list[tuple[int, int]] = []
    for offset in range(period):
        if (found.end - found.begin - offset) // period < LEAST_STEPS:
            break
        border = middle + offset
        nbytes = 0
        for node in nodes[border - period : border]:
            later = [index.get(user, -1) for user in node.users]
            if any(border <= one < border + period for one in later):
                nbytes += _nbytes(node)
        crossing.append((nbytes, offset))
    return [found.begin + offset for _, offset in sorted(crossing)[:_MOST_BEGINNINGS]]


def _nbytes(node: Node) -> int:
    """Return the bytes of a value; those of a tuple, which no step can hand on, are many."""
    one = node.meta["val"]
    return one.numel() * one.element_size() if isinstance(one, torch.Tensor) else 1 << 60
