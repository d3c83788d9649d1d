# SPDX-License-Identifier: Apache-2.0
"""What a search of cast plans chooses among: roundings to give back, and plans that were tried."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from amp_ir.amp.kernels import LIBRARY
from amp_ir.amp.overrides import Override
from amp_ir.amp.plan_parts import parts_of
from amp_ir.ir.step_module import StepModule
from amp_ir.verification.contributions import Contribution
from amp_ir.verification.precision_search import Candidate, GivenBack

# A policy, and what is given back.
Key = tuple[str, tuple[Override, ...]]


@attrs.frozen(eq=False)
class Choice:
    """Roundings that may be given back, and about what that costs."""

    contribution: Contribution
    cost: float

    @property
    def overrides(self) -> tuple[Override, ...]:
        """What gives them back."""
        return self.contribution.overrides

    @property
    def ratio(self) -> float:
        """How much error it makes for what it costs in float32."""
        return self.contribution.error**2 / self.cost

    @property
    def needs_arithmetic(self) -> bool:
        """Whether a library would have to multiply in float32."""
        return any(one.to == "float32" and one.op in LIBRARY for one in self.overrides)

    def given_back(self, plan: Candidate, without: Candidate | None) -> GivenBack:
        """Say what it changes in a plan; `without` is the plan that does not give it back."""
        part = self.contribution
        if without is None:
            return GivenBack(part.name, part.error, None, self.cost, part.overrides)
        more = plan.cost - without.cost
        return GivenBack(part.name, part.error, without.error, more, part.overrides)


@attrs.frozen(eq=False)
class Evaluated:
    """The step under a plan, its error and cost, and the batch that the error is of."""

    mod: StepModule
    candidate: Candidate
    worst_batch: int


@attrs.frozen(eq=False)
class Tried:
    """A plan that was evaluated, and what it gives back."""

    key: Key
    choices: tuple[Choice, ...]
    evaluated: Evaluated

    @property
    def policy(self) -> str:
        """What decides the rest."""
        return self.key[0]

    @property
    def casts(self) -> int:
        """How many casts it has, those in loops too."""
        plan = self.evaluated.mod.plan
        return 0 if plan is None else sum(len(one.plan.casts) for one in parts_of(plan))

    @property
    def candidate(self) -> Candidate:
        """Its error and cost."""
        return self.evaluated.candidate

    @property
    def rank(self) -> tuple[float, int]:
        """The cost, and of equal ones how much is given back."""
        # Times of equal kernels are added up in another order.
        return float(f"{self.candidate.cost:.9g}"), len(self.choices)


def joined(choices: Iterable[Choice]) -> tuple[Override, ...]:
    """Return the overrides of choices, in one order; one that reads float32 includes its result."""
    found = {one for choice in choices for one in choice.overrides}
    kept = [
        one for one in found if one.to == "float32" or attrs.evolve(one, to="float32") not in found
    ]
    return tuple(sorted(kept, key=lambda one: (one.module, one.phase, one.op)))
