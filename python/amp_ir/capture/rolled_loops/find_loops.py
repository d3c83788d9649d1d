# SPDX-License-Identifier: Apache-2.0
"""Loops over time steps become loops again: a graph's size then does not depend on their number.

A loop that a user writes in Python is unrolled in a captured graph, and so is its backward pass.
Where at least 16 periods of ops are alike, and each period reads only values of its own, of the
period before, values from before the loop, or the next entry of a tensor, they are one loop.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from amp_ir.capture.cell_loops.graph_writer import GraphWriter
from amp_ir.capture.cell_loops.merge_steps import merge_stacks
from amp_ir.capture.rolled_loops.merge_parts import merge_parts
from amp_ir.capture.rolled_loops.repeated_ops import NotALoop, repeated_ops
from amp_ir.capture.rolled_loops.repeats import LEAST_STEPS, Range, Signatures, ranges
from amp_ir.capture.rolled_loops.write_loop import write_loop

# How many beginnings of a period are tried, those with the fewest carried values first.
_MOST_BEGINNINGS = 4


def find_loops(module: torch.fx.GraphModule, mode: FakeTensorMode) -> torch.fx.GraphModule:
    """Replace repeated ops by loops.

    Before:  h1 = tanh(h0 + x[0]); h2 = tanh(h1 + x[1]); ...; y = cat([h1, h2, ...])
    After:   hs = run_loop([h0, x]); y = hs       # its body: (h, x) -> tanh(h + x)

    Requires: a functional graph without dead code.
    Ensures:  the same values. Steps that differ from the others stay as they are.
    """
    graph = module.graph
    signatures = Signatures()
    failed: set[tuple[Node, int]] = set()
    has_loops = False
    while _find_one(graph, mode, signatures, failed):
        has_loops = True
    if has_loops:
        writer = GraphWriter(graph, mode)
        merge_stacks(writer)
        merge_parts(writer)
        writer.sort()
        graph.eliminate_dead_code()
    return module


def _find_one(
    graph: torch.fx.Graph,
    mode: FakeTensorMode,
    signatures: Signatures,
    failed: set[tuple[Node, int]],
) -> bool:
    """Write the first loop that there is; return whether there was one."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    if len(nodes) < 3 * LEAST_STEPS:
        return False
    index = {node: k for k, node in enumerate(nodes)}
    for found in ranges(signatures.of(nodes)):
        key = (nodes[found.begin], found.period)
        if key in failed:
            continue
        for begin in _beginnings(nodes, index, found):
            count = (found.end - begin) // found.period
            try:
                ops = repeated_ops(nodes, index, begin, found.period, count)
                writer = GraphWriter(graph, mode)
                write_loop(writer, ops)
            except NotALoop:
                continue
            writer.sort()
            graph.eliminate_dead_code()
            return True
        failed.add(key)
    return False


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
