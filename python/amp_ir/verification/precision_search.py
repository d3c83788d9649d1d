# SPDX-License-Identifier: Apache-2.0
"""PrecisionSearch: the cheapest plan that was found within an error budget, and what it gave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from amp_ir.amp.overrides import Override
from amp_ir.amp.plan import CastPlan
from amp_ir.files.strict_json import strict_json
from amp_ir.ir.step_module import StepModule

OBJECTIVES = ("time", "memory")
# The plans that are compared at the end.
BEGUN, CONSERVATIVE, SEARCHED, FLOAT32 = "begun with", "conservative", "searched", "float32"
_UNITS = {"time": ("ms", 1.0), "memory": ("MiB", 2.0**20)}


@attrs.frozen
class Candidate:
    """One plan that was tried: its gradient error, the largest of the batches, and its cost.

    `cost` is estimated milliseconds, or bytes of the planned peak.
    """

    error: float
    cost: float


@attrs.frozen
class ComparedPlan:
    """A plan that was compared at the end.

    Attributes:
        name: "begun with", "conservative" (the policy), "searched" (the cheapest within the budget
            by the estimate, where it is neither of these), or "float32".
        error: its gradient error, the largest of the batches.
        cost: estimated milliseconds, or bytes of the planned peak.
        is_within: whether the error is within the budget.
        milliseconds: of a measured step; None where nothing was measured.
    """

    name: str
    error: float
    cost: float
    is_within: bool
    milliseconds: float | None = None


def best_within(compared: Sequence[ComparedPlan]) -> ComparedPlan:
    """Return the fastest of the measured plans within the budget, or else the cheapest one.

    Of equal ones it is the one with the smallest error, and float32 if that is one of these: what
    costs no time need not be rounded.

    Requires: one of them is within the budget, and all were measured or none.
    """
    within = [one for one in compared if one.is_within]
    return min(within, key=lambda one: (_time_or_cost(one), one.error, one.name != FLOAT32))


def _time_or_cost(one: ComparedPlan) -> float:
    # Times of equal kernels are added up in another order.
    return float(f"{one.cost:.9g}") if one.milliseconds is None else one.milliseconds


@attrs.frozen
class GivenBack:
    """Roundings that the plan does without: the ops they are of, and what that costs.

    Attributes:
        name: what is float32 now, as an error report names it.
        error: the gradient error that they made alone.
        error_without: the plan's gradient error if they were low after all; None where the search
            ended before that.
        cost: what the plan costs more than with them low; milliseconds or bytes.
        overrides: what to give `autocast` or `jit` for these alone.
    """

    name: str
    error: float
    error_without: float | None
    cost: float
    overrides: tuple[Override, ...]


@attrs.frozen(kw_only=True)
class PrecisionSearch:
    """The best plan within a budget: `mod` is the step that follows `plan`.

    Attributes:
        mod: the step after autocast; None where float32 is the best.
        max_error: the budget.
        found: the plan's error and cost.
        default: those of the plan that was begun with.
        full: those of the step in float32.
        given_back: what is float32 and was low, the most expensive first.
        overrides: what makes `autocast` decide as the plan does, with `policy`: for `autocast` or
            `jit`.
        compared: the plan of the least estimated cost beside those that the search began with and
            float32, with their measured times.
        returned: the name of the one that is returned.
        how_compared: how they were measured, or why not.
        machine: whose rates the estimates are of.
        batches: how many batches the error is the largest of.
        plans: how many plans were evaluated.
        is_complete: whether the search ended by itself, not by time or an interrupt.
    """

    mod: StepModule | None = attrs.field(repr=False)
    amp_dtype: str
    objective: str
    max_error: float
    found: Candidate
    default: Candidate
    full: Candidate
    given_back: tuple[GivenBack, ...]
    overrides: tuple[Override, ...]
    policy: str
    compared: tuple[ComparedPlan, ...]
    returned: str
    how_compared: str
    machine: str
    batches: int
    plans: int
    seconds: float
    is_complete: bool

    @property
    def plan(self) -> CastPlan | None:
        """The plan, to save, compare and replay; None for float32."""
        return None if self.mod is None else self.mod.plan

    def to_json(self) -> str:
        """Return everything but the plan, which has `save`, as JSON."""
        data = attrs.asdict(self, filter=lambda attribute, _value: attribute.name != "mod")
        return strict_json(data) + "\n"

    def __str__(self) -> str:
        """Return the result as text."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield (
            f"{self.amp_dtype}, gradient error at most {self.max_error:.2e} on {self.batches} batch"
            f"{'es' if self.batches > 1 else ''}; {self.plans} plans in {self.seconds:.0f} s"
            + ("" if self.is_complete else ", ended early: the best so far")
        )
        yield from self._table()
        yield from self._verdict()
        if self.mod is None:
            return
        if not self.given_back:
            yield f'Nothing had to be given back under the policy "{self.policy}".'
            return
        yield f'Given back to float32, under the policy "{self.policy}", with what that costs,'
        yield "and the error if it stayed low:"
        for part in self.given_back:
            error = "" if part.error_without is None else f"{part.error_without:.2e}"
            yield f"  {self._shown(part.cost):>12}  {error:>9}  {part.name}"

    def _table(self) -> Iterator[str]:
        what = "estimated time" if self.objective == "time" else "planned peak"
        is_measured = self.compared[0].milliseconds is not None
        yield f"  {'':<14} {'error':>9}  {what:>14}" + f"  {'measured':>11}" * is_measured
        for one in self.compared:
            time = "" if one.milliseconds is None else f"  {f'{one.milliseconds:.4g} ms':>11}"
            note = "  returned" if one.name == self.returned else ""
            note = note if one.is_within else "  over the budget"
            yield f"  {one.name:<14} {one.error:>9.2e}  {self._shown(one.cost):>14}{time}{note}"
        rates = f"; estimated for {self.machine}" if self.objective == "time" else ""
        yield f"({self.how_compared}{rates})"

    def _verdict(self) -> Iterator[str]:
        """Say where the estimate was wrong, and where low precision does not pay."""
        estimated = best_within([attrs.evolve(one, milliseconds=None) for one in self.compared])
        if estimated.name != self.returned:
            yield (
                f'By the estimate "{estimated.name}" costs less; measured, "{self.returned}" is '
                "faster."
            )
        if self.mod is None:
            yield "The step stays in float32: no plan within the budget was found to cost less."

    def _shown(self, cost: float) -> str:
        unit, divisor = _UNITS[self.objective]
        return f"{cost / divisor:.4g} {unit}"
