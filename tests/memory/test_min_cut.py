# SPDX-License-Identifier: Apache-2.0
"""The C++ minimum cut against brute force, on edge cases, and at size."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_ir.host import native

EDGES = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 9)), max_size=25)


def min_cut(vertices, edges, source, sink):
    flat = list(itertools.chain.from_iterable(edges))
    answer = list(native.function("amp_ir.min_cut")(vertices, flat, source, sink))
    return answer[0], answer[1:]


def capacity(edges, side):
    return sum(c for start, end, c in edges if side[start] and not side[end])


@settings(max_examples=200, deadline=None)
@given(EDGES)
def test_the_value_is_the_least_of_all_cuts_and_the_side_is_the_smallest(edges):
    value, side = min_cut(7, edges, 0, 6)
    assert (side[0], side[6], capacity(edges, side)) == (1, 0, value)
    for middle in itertools.product([0, 1], repeat=5):
        other = [1, *middle, 0]
        assert capacity(edges, other) >= value
        if capacity(edges, other) == value:
            assert all(mine <= theirs for mine, theirs in zip(side, other, strict=True))


def test_a_long_chain_needs_no_call_stack():
    count = 100_000
    chain = [(i, i + 1, 5 - (i == 70_000)) for i in range(count - 1)]
    value, side = min_cut(count, chain, 0, count - 1)
    assert value == 4
    assert sum(side) == 70_001


def test_a_hundred_thousand_vertices():
    """Takes under a second; an algorithm of a higher order would not end."""
    draw = random.Random(0)
    count = 100_000
    edges = []
    for vertex in range(1, count - 1):
        terminal = (0, vertex) if draw.random() < 0.5 else (vertex, count - 1)
        edges.append((*terminal, draw.randrange(1, 1 << 22)))
        for _ in range(2):
            other = max(1, vertex - draw.randrange(1, 60))
            edges.append((vertex, other, draw.randrange(1, 1 << 22)))
            edges.append((other, vertex, draw.randrange(1, 1 << 22)))
    value, side = min_cut(count, edges, 0, count - 1)
    assert value == capacity(edges, side) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, [0, 1], 0, 1), "got 2 numbers; give three an edge"),
        ((2, [0, 5, 1], 0, 1), "the end of an edge is vertex 5; there are 2"),
        ((2, [0, 1, -1], 0, 1), "edge 0 has capacity -1"),
        ((2, [0, 1, 1], 1, 1), "source and sink are both vertex 1"),
        ((2, [0, 1, 1], 0, 2), "sink is vertex 2; there are 2"),
    ],
)
def test_wrong_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        native.function("amp_ir.min_cut")(*arguments)
