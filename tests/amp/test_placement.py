# SPDX-License-Identifier: Apache-2.0
"""The cut is the best labelling there is, and never worse than RAF's greedy one."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from amp_ir.amp import placement as placing
from amp_ir.amp.autocast import native_cut
from amp_ir.amp.decisions import decide
from amp_ir.amp.hints import RULES
from amp_ir.amp.kernels import kernels_of, places_of
from amp_ir.amp.placement import ALWAYS_FULL, ALWAYS_LOW, Copy, Problem, solve
from amp_ir.ir.step_graph import read_step
from random_steps import random_step

NBYTES = st.integers(0, 20)


@st.composite
def problems(draw, max_vertices=10):
    """A placement problem with shared copies of every kind."""
    count = draw(st.integers(1, max_vertices))
    vertices = st.integers(0, count - 1)
    costs = st.lists(NBYTES, min_size=count, max_size=count)
    producers = st.one_of(st.sampled_from([ALWAYS_LOW, ALWAYS_FULL]), vertices)
    readers = st.lists(vertices, min_size=1, max_size=4, unique=True).map(tuple)
    copies = st.builds(Copy, producers, readers, st.sampled_from(["low", "full"]), NBYTES)
    return Problem(draw(costs), draw(costs), draw(st.lists(copies, max_size=12)))


def labellings(problem):
    return itertools.product([False, True], repeat=len(problem.low_nbytes))


@settings(max_examples=150, deadline=None)
@given(problems())
def test_the_cut_equals_brute_force(problem):
    best = min(problem.cost(labels) for labels in labellings(problem))
    chosen, bound = solve(problem, native_cut)
    assert problem.cost(chosen) == bound == best


@settings(max_examples=8, deadline=None)
@given(problems(max_vertices=14))
def test_the_cut_equals_brute_force_at_fourteen_free_ops(problem):
    best = min(problem.cost(labels) for labels in labellings(problem))
    chosen, bound = solve(problem, native_cut)
    assert problem.cost(chosen) == bound == best


@settings(max_examples=60, deadline=None)
@given(problems(max_vertices=7))
def test_of_equal_labellings_the_one_with_fewest_low_is_taken(problem):
    chosen, _ = solve(problem, native_cut)
    cost = problem.cost(chosen)
    for labels in labellings(problem):
        if problem.cost(labels) == cost:
            assert all(mine <= other for mine, other in zip(chosen, labels, strict=True))


@settings(max_examples=60, deadline=None)
@given(problems(), st.randoms())
def test_the_order_of_visits_has_no_influence(problem, random):
    count = len(problem.low_nbytes)
    order = list(range(count))
    random.shuffle(order)
    place = {vertex: number for number, vertex in enumerate(order)}
    copies = [
        Copy(
            place.get(copy.producer, copy.producer),
            tuple(place[reader] for reader in copy.readers),
            copy.wants,
            copy.nbytes,
        )
        for copy in problem.copies
    ]
    random.shuffle(copies)
    low = [problem.low_nbytes[vertex] for vertex in order]
    shuffled = Problem(low, [problem.full_nbytes[vertex] for vertex in order], copies)
    chosen, _ = solve(shuffled, native_cut)
    assert [chosen[place[vertex]] for vertex in range(count)] == solve(problem, native_cut)[0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 999), min_size=20, max_size=80))
def test_on_programs_the_cut_is_never_above_greedy(draws):
    graph = read_step(random_step(draws, size=20))
    dtypes = ["float32"] * len(graph.outputs)
    decisions = decide(graph, RULES.get, "bfloat16", dtypes)
    places = places_of(graph, kernels_of(graph))
    problem = placing.build_problem(graph, decisions, places, dtypes)
    cut = problem.cost(solve(problem, native_cut)[0])
    assert cut <= problem.cost(placing.greedy(graph, decisions))
