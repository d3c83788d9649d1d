# SPDX-License-Identifier: Apache-2.0
"""Where the ops of a graph repeat: ranges in which each op equals the one a period later."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch.fx import Node

from amp_ir.capture.cell_loops.graph_writer import arguments, place
from amp_ir.capture.rolled_loops.step_numbers import step_number

aten = torch.ops.aten
# Loops of fewer steps stay unrolled: each step's kernels can then be fused with its neighbours'.
LEAST_STEPS = 16
_LEAST_PERIOD = 3
_LONGEST_WINDOW = 512
_MOST_PERIODS = 12
_MOST_RANGES = 24
# Ops of ours that a loop may hold; any op of ATen's is one.
_HELD = frozenset({"amp_ir.attention", "amp_ir.attention_backward"})
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@attrs.frozen
class Range:
    """Ops [begin, end) of a graph, each equal to that a period later."""

    begin: int
    end: int
    period: int


class Signatures:
    """A number for each node, the same for nodes of the same op, options, type and location.

    Where a step reads another entry of a tensor than the step before, the index may differ.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._of_node: dict[Node, int] = {}
        self._differing: set[Node] = set()

    def of(self, nodes: Sequence[Node]) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Return the numbers of nodes."""
        if not self._of_node:
            self._differing = _with_differing_numbers(nodes)
        for node in nodes:
            if node not in self._of_node:
                key = _described(node, has_number=node not in self._differing)
                self._of_node[node] = self._numbers.setdefault(key, len(self._numbers))
        return np.array([self._of_node[node] for node in nodes], np.uint64)


def _with_differing_numbers(nodes: Sequence[Node]) -> set[Node]:
    """Return the calls whose number may be another one at each step, as that of the step is."""
    alike: dict[Any, list[Node]] = {}
    for node in nodes:
        if step_number(node) is not None:
            alike.setdefault(_described(node, has_number=False), []).append(node)
    return {
        node
        for group in alike.values()
        if len({repr(step_number(one)) for one in group}) >= LEAST_STEPS
        for node in group
    }


def _described(node: Node, *, has_number: bool) -> Any:
    """Return what two nodes that repeat have in common; for an op that no loop holds, itself."""
    if place(node).phase == "optimizer":
        return node
    args: Sequence[Any] = node.args
    if node.target in (aten.select.int, aten.slice.Tensor):
        # The index, or begin and end.
        args = arguments(node, None, 0, None, None, 1)
        args = (*args[:2], *args[4:])
    if not has_number:
        args = (args[0], type(args[1]))
    return (
        node.target,
        _constant(args),
        _constant(dict(node.kwargs)),
        _type(node.meta["val"]),
        place(node),
    )


def why_no_loop_holds(node: Node) -> str:
    """Return why a loop cannot hold a node; "" where it can."""
    if node.target is operator.getitem:
        return ""
    if not isinstance(node.target, torch._ops.OpOverload):
        return f"each step calls {getattr(node.target, '__name__', node.target)}"
    name = str(node.target).removesuffix(".default")
    if node.target.namespace == "aten" or name in _HELD:
        return ""
    return f"each step calls {name.replace('amp_ir_written.', '')}"


def _constant(value: Any) -> Any:
    if isinstance(value, Node):
        return Node
    if isinstance(value, (list, tuple)):
        return tuple(_constant(one) for one in value)
    if isinstance(value, dict):
        return tuple((name, _constant(one)) for name, one in sorted(value.items()))
    # repr tells 0.0 from -0.0, and False from 0.
    return repr(value)


def _type(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.device
    if isinstance(value, (list, tuple)):
        return tuple(_type(one) for one in value)
    return type(value)


def ranges(numbers: np.ndarray[Any, np.dtype[np.uint64]]) -> list[Range]:
    """Return the ranges that repeat at least `LEAST_STEPS` times, the longest first."""
    found = []
    for period in _periods(numbers):
        same = numbers[:-period] == numbers[period:]
        edges = np.flatnonzero(np.diff(np.concatenate(([False], same, [False])).astype(np.int8)))
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            if end - begin >= (LEAST_STEPS - 1) * period:
                found.append(Range(begin, end + period, period))
    # Of a loop's period and its multiples, the period itself comes first.
    return sorted(found, key=_rank)[:_MOST_RANGES]


def _rank(one: Range) -> tuple[int, int]:
    """Order by length, in steps of an eighth, and then by period."""
    return -int(8 * np.log2(one.end - one.begin)), one.period


def _periods(numbers: np.ndarray[Any, np.dtype[np.uint64]]) -> list[int]:
    """Return the distances at which windows of some length come again often enough."""
    found: dict[int, int] = {}
    window, length = numbers * _MULTIPLIER + np.uint64(1), 1
    while length <= _LONGEST_WINDOW and len(window) > LEAST_STEPS:
        order = np.argsort(window, kind="stable")
        again = window[order[1:]] == window[order[:-1]]
        distances, counts = np.unique((order[1:] - order[:-1])[again], return_counts=True)
        often = (counts >= LEAST_STEPS - 1) & (distances >= _LEAST_PERIOD)
        often &= distances <= len(numbers) // LEAST_STEPS
        pairs = zip(distances[often].tolist(), counts[often].tolist(), strict=True)
        for distance, count in sorted(pairs, key=lambda pair: -pair[1])[:_MOST_PERIODS]:
            found[distance] = max(count, found.get(distance, 0))
        window = window[:-length] * (_MULTIPLIER + np.uint64(2 * length)) ^ window[length:]
        length *= 2
    return sorted(found)
