# SPDX-License-Identifier: Apache-2.0
"""Choose the dtype of each free op's result: a minimum cut over bytes, or RAF's greedy majority.

The cost model. Loops compute in float32 whatever they read, so a cast beside an op of the same
kernel costs nothing; bytes move only where a value crosses from one kernel to another. The kernels
are those that fusion makes of the step before any cast (kernels.py); a value that its readers
recompute is in all of their kernels, and so is a matmul in the library call that adds its bias.
With n elements, a low copy has 2n bytes and a full one 4n.

- A value stored low is written once, 2n, if a kernel other than its own reads it, and each such
  kernel reads 2n. An op that must have it in float32 widens it in registers, unless that op is a
  library call: then a kernel of its own widens it, 2n + 4n, and the call reads 4n.
- A value stored full has a full copy, 4n written and 4n read in each kernel, for those that want it
  full, and a low copy, 2n written and 2n read in each, for those that want it low. Where a library
  call made the value, the low copy takes a kernel of its own, 4n more to read; loops read the full
  copy instead.
- A free op wants its arguments in the dtype of its result. A copy is counted once, however many
  read it. An output of the step is written in its own dtype, in addition.
- A value that is read again in a later phase counts once more: it occupies memory until then.
- Inputs exist in float32 and loops read them so; their casts for library calls are there in any
  placement.

For two labels this is minimised exactly by an s-t cut (Kolmogorov and Zabih 2004): free ops are
vertices, sums over one op are edges to a terminal, and each copy is one auxiliary vertex. One
thing is rounded up, since it would not be submodular: a value stored full is charged the full copy
if any free op of another kernel reads it, even if all of these end up low. The result is optimal
under this model and no more is claimed. Of several optima the one with most ops in float32 is
taken, which is unique: the order in which ops are visited has no influence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import attrs

from amp_ir.amp.decisions import Decision, Mode
from amp_ir.amp.kernels import Kind, Places, kind_of
from amp_ir.ir.step_graph import StepGraph, Value

LOW_NBYTES = 2
FULL_NBYTES = 4
# Terminals, where a copy's producer is not a free op.
ALWAYS_LOW = -1
ALWAYS_FULL = -2
# The kernel number of whoever reads a low output.
_OUTSIDE = -1
Cut = Callable[[int, Sequence[tuple[int, int, int]], int, int], tuple[list[bool], int]]


@attrs.frozen
class Copy:
    """A possible copy of a value in the dtype `wants`, of `nbytes`.

    It is made where the producer has the other label and one of the readers is `wants`.
    """

    producer: int
    readers: tuple[int, ...]
    wants: Literal["low", "full"]
    nbytes: int


@attrs.define
class Problem:
    """Costs in bytes of labelling vertices 0..n-1 low or full.

    `open_ops` are ops in float32 by rule whose result need not be stored so: that depends on the
    labels of its readers.
    """

    low_nbytes: list[int]
    full_nbytes: list[int]
    copies: list[Copy] = attrs.field(factory=list)
    open_ops: set[int] = attrs.field(factory=set)

    def cost(self, is_low: Sequence[bool]) -> int:
        """Return the bytes of one labelling."""
        total = sum(
            low if label else full
            for low, full, label in zip(self.low_nbytes, self.full_nbytes, is_low, strict=True)
        )
        for copy in self.copies:
            wants_low = copy.wants == "low"
            has_low = copy.producer == ALWAYS_LOW if copy.producer < 0 else is_low[copy.producer]
            if has_low != wants_low and any(is_low[r] == wants_low for r in copy.readers):
                total += copy.nbytes
        return total


@attrs.define
class _Readers:
    """Readers of a value in memory: kernels by what they want, and free ops by kernel."""

    full: set[int] = attrs.field(factory=set)
    full_library: set[int] = attrs.field(factory=set)
    low: set[int] = attrs.field(factory=set)
    varying: dict[int, list[int]] = attrs.field(factory=dict)
    is_output: bool = False
    is_held: bool = False
    is_read_in_kernel: bool = False

    @property
    def kernels(self) -> int:
        """Return how many kernels read the value."""
        return len(self.full | self.low | set(self.varying))


def free_ops(graph: StepGraph, decisions: Sequence[Decision]) -> list[int]:
    """Return the ops whose label the placement chooses; the vertices, in order."""
    return [
        op.position for op in graph.ops if decisions[op.position].label == "free" and not op.is_view
    ]


def build_problem(
    graph: StepGraph,
    decisions: Sequence[Decision],
    places: Places,
    output_dtypes: Sequence[str],
) -> Problem:
    """Return the costs of a step, as the module describes."""
    vertices = {position: number for number, position in enumerate(free_ops(graph, decisions))}
    problem = Problem([0] * len(vertices), [0] * len(vertices))
    readers = _readers_of_roots(graph, decisions, places, vertices)
    _add_outputs(graph, output_dtypes, readers)
    libraries = _library_kernels(graph, places)
    for root, who in readers.items():
        value = graph.values[root]
        if value.op < 0 or value.dtype != "float32":
            continue
        decision = decisions[value.op]
        makes_low = not places[value.op] & libraries
        follows = decision.follows[graph.ops[value.op].results.index(root)]
        if value.op in vertices and follows:
            _charge_free(problem, vertices[value.op], value, who, makes_low=makes_low)
        elif not (decision.label == "low" and follows) and makes_low:
            _charge_full(problem, value, who)
    return problem


def _readers_of_roots(
    graph: StepGraph,
    decisions: Sequence[Decision],
    places: Places,
    vertices: dict[int, int],
) -> dict[int, _Readers]:
    found: dict[int, _Readers] = {}
    for op in graph.ops:
        if op.is_view:
            continue
        for leaf, mode in zip(op.reads, decisions[op.position].modes, strict=True):
            root = graph.values[leaf].root
            made_by = graph.values[root].op
            here = places[op.position]
            there = places[made_by] if made_by >= 0 else frozenset()
            who = found.setdefault(root, _Readers())
            who.is_read_in_kernel |= bool(here & there)
            if not here - there:
                continue
            if mode is Mode.VARY and op.position in vertices:
                for kernel in here - there:
                    who.varying.setdefault(kernel, []).append(vertices[op.position])
            elif mode in (Mode.LOW, Mode.EITHER):
                who.low |= here - there
            else:
                who.full |= here - there
                if kind_of(op) is not Kind.LOOP:
                    who.full_library |= here - there
            if made_by >= 0 and op.location.phase != graph.ops[made_by].location.phase:
                who.is_held = True
    return found


def _library_kernels(graph: StepGraph, places: Places) -> frozenset[int]:
    """Return the library calls and hand-written kernels: each result has one dtype."""
    own = [places[op.position] for op in graph.ops if kind_of(op) in (Kind.LIBRARY, Kind.OPAQUE)]
    return frozenset().union(*own)


def _add_outputs(
    graph: StepGraph, output_dtypes: Sequence[str], readers: dict[int, _Readers]
) -> None:
    for leaf, dtype in zip(graph.outputs, output_dtypes, strict=True):
        who = readers.setdefault(graph.values[leaf].root, _Readers())
        if dtype == "float32":
            who.is_output = True
        else:
            who.low.add(_OUTSIDE)


def _charge_free(
    problem: Problem, vertex: int, value: Value, who: _Readers, *, makes_low: bool
) -> None:
    """Add the costs of a value whose producer is a free op."""
    low, full = LOW_NBYTES * value.size, FULL_NBYTES * value.size
    is_read = who.kernels > 0
    has_full_copy = bool(who.full or who.varying or who.is_output)
    low_cost = low * (is_read + who.kernels) + len(who.full_library) * full
    low_cost += (low + full) * bool(who.full_library)
    full_cost = full * (has_full_copy + len(who.full | set(who.varying)))
    if who.low:
        full_cost += low * (1 + len(who.low))
        if not makes_low:
            full_cost += full + full * (not has_full_copy)
    if who.is_output:
        low_cost += full if makes_low else full + low + low * (not is_read)
    if who.is_held and is_read:
        low_cost += low
        full_cost += full if has_full_copy else low
    if who.low and not (has_full_copy or who.is_read_in_kernel):
        full_cost += 1  # the same bytes: rather an op that is low than a full one and its cast
    problem.low_nbytes[vertex] += low_cost
    problem.full_nbytes[vertex] += full_cost
    if makes_low and who.varying and not who.low:
        everyone = tuple(sorted({r for readers in who.varying.values() for r in readers}))
        problem.copies.append(Copy(vertex, everyone, "low", low))


def _charge_full(problem: Problem, value: Value, who: _Readers) -> None:
    """Add the costs, for the free ops that read it, of a value that a loop stores in float32."""
    if not who.varying:
        return
    low, full = LOW_NBYTES * value.size, FULL_NBYTES * value.size
    everyone = tuple(sorted({r for readers in who.varying.values() for r in readers}))
    held = 2 if who.is_held else 1
    if not who.full and not who.is_output:
        problem.open_ops.add(value.op)
        problem.copies.append(Copy(ALWAYS_LOW, everyone, "full", held * full))
    if not who.low:
        problem.copies.append(Copy(ALWAYS_FULL, everyone, "low", held * low))
    for kernel, readers in sorted(who.varying.items()):
        if kernel not in who.full:
            problem.copies.append(Copy(ALWAYS_LOW, tuple(readers), "full", full - low))


def solve(problem: Problem, min_cut: Cut) -> tuple[list[bool], int]:
    """Return the cheapest labelling, True for low, with the fewest low among equals; and a bound.

    The bound, the value of a maximum flow, is reached by the labelling and undercut by none.
    `min_cut(vertices, edges, source, sink)` returns for each vertex whether it is on the source
    side of the smallest minimum cut, and the cut's value; an edge is (from, to, capacity).
    """
    count = len(problem.low_nbytes)
    source, sink = count, count + 1
    edges: list[tuple[int, int, int]] = []
    base = [min(pair) for pair in zip(problem.low_nbytes, problem.full_nbytes, strict=True)]
    for vertex, least in enumerate(base):
        # A vertex on the sink's side is full and cuts its edge from the source, and conversely.
        if problem.full_nbytes[vertex] > least:
            edges.append((source, vertex, problem.full_nbytes[vertex] - least))
        if problem.low_nbytes[vertex] > least:
            edges.append((vertex, sink, problem.low_nbytes[vertex] - least))
    unbounded = 1 + sum(capacity for _, _, capacity in edges)
    unbounded += sum(copy.nbytes for copy in problem.copies)
    number = sink
    for copy in problem.copies:
        number += 1
        producer = {ALWAYS_LOW: source, ALWAYS_FULL: sink}.get(copy.producer, copy.producer)
        if copy.wants == "low":
            edges.append((number, producer, copy.nbytes))
            edges.extend((reader, number, unbounded) for reader in copy.readers)
        else:
            edges.append((producer, number, copy.nbytes))
            edges.extend((number, reader, unbounded) for reader in copy.readers)
    sides, value = min_cut(number + 1, edges, source, sink)
    return sides[:count], sum(base) + value


def greedy(graph: StepGraph, decisions: Sequence[Decision]) -> list[bool]:
    """Place as RAF does: in program order, a free op is low if at least half its arguments are."""
    is_low: dict[int, bool] = {}
    labels = []
    for op in graph.ops:
        decision = decisions[op.position]
        votes = [
            is_low.get(graph.values[leaf].root, False)
            for leaf, mode in zip(op.reads, decision.modes, strict=True)
            if mode in (Mode.VARY, Mode.EITHER, Mode.LOW)
        ]
        low = decision.label == "low"
        if decision.label == "free" and not op.is_view:
            low = decision.sets_result or 2 * sum(votes) >= max(len(votes), 1)
            labels.append(low)
        for leaf, follows in zip(op.results, decision.follows, strict=True):
            if not op.is_view:
                is_low[leaf] = low and follows
    return labels
