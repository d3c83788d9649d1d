# SPDX-License-Identifier: Apache-2.0
"""Whatever errors and costs plans have, the search keeps the budget and returns no dearer one."""

from __future__ import annotations

import math
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from amp_ir.amp.overrides import Override
from amp_ir.verification.contributions import Contribution
from amp_ir.verification.plan_choices import Choice, Evaluated, Tried
from amp_ir.verification.plan_search import PlanSearch
from amp_ir.verification.precision_search import Candidate, ComparedPlan, best_within

BUDGET = 0.1
POLICIES = ("default", "conservative")


class Plans:
    """Plans of so many ops whose errors and costs are anything, but the same at each asking.

    An evaluation may be interrupted.
    """

    def __init__(self, seed: int, ops: int, interrupted_at: int | None = None) -> None:
        self.seed, self.ops, self.interrupted_at = seed, ops, interrupted_at
        self.found: dict[Any, Candidate] = {}

    def evaluated(self, overrides: tuple[Override, ...], policy: str) -> Evaluated:
        if len(self.found) == self.interrupted_at:
            raise KeyboardInterrupt
        key = policy, tuple(one.module for one in overrides)
        drawn = random.Random(f"{self.seed} {key}")
        error = drawn.choice([0.0, 0.02, BUDGET, 0.11, 1.0, math.inf])
        self.found[key] = Candidate(error, drawn.choice([1.0, 2.0, 3.0, 5.0, drawn.random() * 9]))
        return Evaluated(None, self.found[key], 0)

    def choices(self, tried: Tried) -> list[Choice]:
        given = {one.module for one in tried.key[1]}
        drawn = random.Random(f"{self.seed} {tried.key}")
        names = [f"m{n}" for n in range(self.ops) if f"m{n}" not in given]
        return [Choice(contribution(name, drawn.random()), drawn.random() + 0.01) for name in names]

    def show(self, text: str) -> None:
        assert text


def contribution(module: str, error: float) -> Contribution:
    override = Override(op="relax.matmul", module=module, phase="forward", to="float32")
    return Contribution(
        "relax.matmul", module, "forward", False, 1, error, "", "", elements=8,
        overrides=(override,),
    )  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 10**9), st.integers(0, 7), st.none() | st.integers(1, 20))
def test_the_best_plan_is_within_the_budget_and_the_cheapest_that_was_tried(seed, ops, stop):
    plans = Plans(seed, ops, stop)
    search = PlanSearch(plans, BUDGET)
    search.run(POLICIES)
    within = [one for one in plans.found.values() if one.error <= BUDGET]
    assert (search.best is None) == (not within)
    if search.best is not None:
        assert search.best.candidate.error <= BUDGET
        assert search.best.candidate.cost <= min(one.cost for one in within) * (1 + 1e-8)
    is_over = stop is not None and len(plans.found) == stop
    assert search.is_complete or is_over
    if search.is_complete:
        # Neither of the plans that a user has without a search is cheaper.
        assert {(policy, ()) for policy in POLICIES} <= set(plans.found)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10**9), st.integers(1, 7))
def test_where_no_time_is_left_the_plans_to_begin_with_are_compared(seed, ops):
    plans = Plans(seed, ops)
    search = PlanSearch(plans, BUDGET)
    search.run(POLICIES, until=0.0)
    assert set(plans.found) == {(policy, ()) for policy in POLICIES}
    assert search.is_complete == (plans.found["default", ()].error <= BUDGET)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**9), st.integers(0, 7))
def test_a_search_gives_the_same_again(seed, ops):
    found = []
    for _ in range(2):
        search = PlanSearch(Plans(seed, ops), BUDGET)
        search.run(POLICIES)
        found.append((list(search.tried), search.best and search.best.key))
    assert found[0] == found[1]


NUMBERS = st.floats(1e-3, 1e3)
ROWS = st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=5)


@given(ROWS, st.booleans(), NUMBERS)
def test_the_returned_plan_is_the_fastest_within_the_budget(rows, is_measured, budget):
    compared = [
        ComparedPlan(str(n), error, cost, error <= budget, milliseconds if is_measured else None)
        for n, (error, cost, milliseconds) in enumerate(rows)
    ]
    compared.append(ComparedPlan("float32", 0.0, 5.0, True, 5.0 if is_measured else None))
    best = best_within(compared)
    assert best.error <= budget
    for one in compared:
        if one.is_within and is_measured:
            assert best.milliseconds <= one.milliseconds
        elif one.is_within:
            assert best.cost <= one.cost * (1 + 1e-8)


def test_of_equally_fast_plans_the_most_exact_one_is_returned():
    low = ComparedPlan("begun with", 1e-3, 1.0, True)
    full = ComparedPlan("float32", 1e-7, 1.0 + 1e-12, True)
    assert best_within([low, full]) is full
