# SPDX-License-Identifier: Apache-2.0
"""The order in which a search of cast plans tries them, and the cheapest one within the budget.

An error budget with costs is a knapsack. Roundings of different ops are nearly independent, so that
their errors add up about as squares do: whoever buys most error for its cost is given back first.
That only orders the choices. Whether a plan is within the budget is decided by evaluating it.

1. The plans of all policies as they are, so that nothing dearer than one of them is returned. The
   first one within the budget: done.
2. The error that each op's roundings make alone, and what float32 costs there.
3. The shortest beginning of that list, by error over cost, that is within the budget, by bisection;
   the policy decides the rest anew around what is given back. If all of it is not enough, 2 and 3
   are repeated with the roundings that are left. Once more with all that keeps matmuls low first,
   and both once more from the next policy.
4. Each op that was given back is tried low again, the most expensive first, and stays so if the
   plan is still within the budget.

The best plan so far is kept throughout: time, or an interrupt, ends the search with that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import attrs

from amp_ir.amp.overrides import Override
from amp_ir.verification.plan_choices import Choice, Evaluated, Key, Tried, joined
from amp_ir.verification.precision_search import GivenBack

# How often roundings that a plan leaves are measured again.
_ROUNDS = 4


class Plans(Protocol):
    """Evaluates plans; what `PlanSearch` knows of a step."""

    def evaluated(self, overrides: tuple[Override, ...], policy: str) -> Evaluated:
        """Return the plan that a policy makes beside overrides, with its error and cost."""

    def choices(self, tried: Tried) -> list[Choice]:
        """Return what else a plan may give back."""

    def show(self, text: str) -> None:
        """Show what is tried."""


class _EndedError(Exception):
    """The time is over."""


class PlanSearch:
    """Tries plans; knows the best one within the budget at any time."""

    def __init__(self, plans: Plans, max_error: float) -> None:
        self.plans, self.max_error = plans, max_error
        self.tried: dict[Key, Tried] = {}
        self.measured: dict[Key, list[Choice]] = {}
        self.best: Tried | None = None
        self.is_complete = True
        self.until = math.inf

    def run(self, policies: Sequence[str], until: float = math.inf) -> None:
        """Search until nothing is left to try, time is over, or the user interrupts.

        The first policy's plan is evaluated whatever happens, those of all policies if only time
        is over.
        """
        begun = [self.try_plan((), policies[0])]
        try:
            begun += [self.try_plan((), policy) for policy in policies[1:]]
            self.until = until
            for one in begun:
                self._search(one)
                if self.is_within(one):
                    break
        except (KeyboardInterrupt, _EndedError):
            self.is_complete = False

    def is_within(self, tried: Tried) -> bool:
        """Whether a plan holds the budget."""
        return tried.candidate.error <= self.max_error

    def try_plan(self, choices: tuple[Choice, ...], policy: str) -> Tried:
        """Return the plan that gives back some choices, evaluated at most once."""
        key = policy, joined(choices)
        if key in self.tried:
            return attrs.evolve(self.tried[key], choices=choices)
        if time.perf_counter() > self.until:
            raise _EndedError
        self.plans.show(f"plan {len(self.tried) + 1}: {len(choices)} given back{self._so_far()}")
        tried = Tried(key, choices, self.plans.evaluated(key[1], policy))
        self.tried[key] = tried
        if self.is_within(tried) and (self.best is None or tried.rank < self.best.rank):
            self.best = tried
        return tried

    def given_back(self, tried: Tried) -> Iterator[GivenBack]:
        """Yield each choice of a plan, with what it changes if that was evaluated."""
        for one in tried.choices:
            rest = joined(c for c in tried.choices if c is not one)
            without = self.tried.get((tried.policy, rest))
            yield one.given_back(tried.candidate, without.candidate if without else None)

    def _so_far(self) -> str:
        if self.best is None:
            return ""
        found = self.best.candidate
        return f"; best so far: error {found.error:.1e}, {len(self.best.choices)} given back"

    def _search(self, begun: Tried) -> None:
        if self.is_within(begun):
            return
        for keeps_arithmetic in (False, True):
            last = begun
            for _ in range(_ROUNDS):
                choices = self._choices(last)
                if keeps_arithmetic:
                    choices.sort(key=lambda one: one.needs_arithmetic)
                last = self._shortest(last, choices)
                if self.is_within(last):
                    self._pruned(last)
                    break

    def _choices(self, tried: Tried) -> list[Choice]:
        """Return what else a plan may give back, whoever makes most error for its cost first."""
        if tried.key not in self.measured:
            self.plans.show(f"rounding ops one after the other{self._so_far()}")
            found = self.plans.choices(tried)
            self.measured[tried.key] = sorted(found, key=lambda one: (-one.ratio, one.cost))
        return list(self.measured[tried.key])

    def _shortest(self, last: Tried, choices: Sequence[Choice]) -> Tried:
        """Return the plan of the shortest beginning of the list that is within the budget.

        All of the list if that is not enough.
        """
        low, high = 0, len(choices)
        everything = self.try_plan((*last.choices, *choices), last.policy)
        if not self.is_within(everything):
            return everything
        found = everything
        while high - low > 1:
            middle = (low + high) // 2
            tried = self.try_plan((*last.choices, *choices[:middle]), last.policy)
            if self.is_within(tried):
                high, found = middle, tried
            else:
                low = middle
        return found

    def _pruned(self, tried: Tried) -> None:
        """Try each choice low again, the most expensive first, until none can be."""
        was: Tried | None = None
        while tried is not was:
            was = tried
            for one in sorted(tried.choices, key=lambda choice: -choice.cost):
                rest = tuple(c for c in tried.choices if c is not one)
                without = self.try_plan(rest, tried.policy)
                if self.is_within(without) and without.rank < tried.rank:
                    tried = without
