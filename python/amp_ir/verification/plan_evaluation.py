# SPDX-License-Identifier: Apache-2.0
"""The error and the cost of cast plans of one step; nothing is compiled."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from amp_ir.amp.override_texts import describe
from amp_ir.amp.overrides import Override, QuietOverride
from amp_ir.api.estimate import StepEstimate, estimate_step
from amp_ir.api.precision import autocast
from amp_ir.host.machine_model import MachineModel
from amp_ir.ir.step_module import StepModule
from amp_ir.rewrites.unroll_loops import unroll_loops
from amp_ir.verification.contributions import Contribution, contributions
from amp_ir.verification.gradients import StepGradients
from amp_ir.verification.outcome import relative_error
from amp_ir.verification.plan_choices import Choice, Evaluated, Tried
from amp_ir.verification.precision_search import Candidate
from amp_ir.verification.reference import check_reference

# Of the time, for measuring single ops.
_MEASURING_SHARE = 0.5


class PlanEvaluation:
    """Evaluates plans of a step on batches, against float64; see `plan_search.Plans`.

    Args:
        mod: the step before autocast.
        batches: flat ones; the error of a plan is the largest of all.
        options: of `autocast` for every plan; what a search gives back comes after its overrides.
        objective: what the cost is, "time" or "memory".
        machine: whose time is estimated.
        until: when the search ends, by `time.perf_counter()`.
        show: shows what is tried.

    Raises:
        OptionError, ArgumentError: as `check_reference`.
    """

    def __init__(
        self,
        mod: StepModule,
        batches: Sequence[Any],
        options: dict[str, Any],
        *,
        objective: str,
        machine: MachineModel,
        until: float,
        show: Callable[[str], None],
    ) -> None:
        self.mod, self.options = mod, options
        self.objective, self.machine, self.until, self.show = objective, machine, until, show
        self.gradients = StepGradients(mod, batches)
        self.exact = [self.gradients.exact(k) for k in range(len(batches))]
        for one in self.exact:
            check_reference(one, "search_precision")
        estimate = self._estimate(mod)
        self.full_milliseconds = estimate.milliseconds_of()
        self.full = Candidate(self._error(self.gradients.mod)[0], self._cost_of(estimate))

    def evaluated(self, overrides: tuple[Override, ...], policy: str) -> Evaluated:
        """Return the plan that a policy makes beside overrides, with its error and cost."""
        low = self.autocast(map(QuietOverride.of, self.all_overrides(overrides)), policy)
        error, worst = self._error(low.with_ir(unroll_loops(low.ir)))
        return Evaluated(low, Candidate(error, self._cost_of(self._estimate(low))), worst)

    def all_overrides(self, overrides: tuple[Override, ...]) -> tuple[Override, ...]:
        """Return what is given back after the overrides that were begun with."""
        return (*self.options["overrides"], *overrides)

    def autocast(self, overrides: Iterable[Override], policy: str) -> StepModule:
        """Return the step under a plan."""
        options = {**self.options, "overrides": tuple(overrides), "policy": policy}
        low: StepModule = autocast(self.mod, **options)
        return low

    def choices(self, tried: Tried) -> list[Choice]:
        """Return what else a plan may give back."""
        mod = tried.evaluated.mod
        low = mod.with_ir(unroll_loops(mod.ir))
        left = max(self.until - time.perf_counter(), 0.0)
        inputs = self.gradients.inputs[tried.evaluated.worst_batch]
        found = contributions(
            low, inputs, self.gradients.wanted(low),
            amp_dtype=self.options["amp_dtype"], seconds=_MEASURING_SHARE * left,
        )  # fmt: skip
        milliseconds = self._estimate(mod).milliseconds_of()
        return [
            Choice(one, self._cost(one, milliseconds))
            for one in found.parts
            if one.error > 0.0 and one.op not in ("", "amp_ir.cast")
        ]

    def without_idle(self, tried: Tried) -> tuple[tuple[Override, ...], StepModule]:
        """Return the overrides of a plan but those that change nothing beside the others."""
        overrides = self.all_overrides(tried.key[1])
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            self.autocast(overrides, tried.policy)
        texts = [str(one.message) for one in said]
        needed = tuple(
            one
            for one in overrides
            if not any(text.startswith(f"{describe(one)} changes nothing") for text in texts)
        )
        mod = self.autocast(map(QuietOverride.of, needed), tried.policy)
        before, after = tried.evaluated.mod.plan, mod.plan
        if before is not None and after is not None and not before.diff(after):
            return needed, mod
        return overrides, tried.evaluated.mod

    def _estimate(self, mod: StepModule) -> StepEstimate:
        return estimate_step(mod, self.machine)

    def _cost_of(self, estimate: StepEstimate) -> float:
        return estimate.milliseconds if self.objective == "time" else float(estimate.peak_nbytes)

    def _error(self, mod: StepModule) -> tuple[float, int]:
        """Return the largest error of the batches, and whose it is."""
        errors = [
            relative_error(self.gradients.evaluated(mod, k), exact)
            for k, exact in enumerate(self.exact)
        ]
        worst = max(range(len(errors)), key=lambda k: errors[k])
        return errors[worst], worst

    def _cost(self, one: Contribution, low: dict[tuple[str, str, str], float]) -> float:
        """Return about what it costs to give roundings back."""
        moved = 2.0 * one.elements
        if self.objective == "memory":
            return moved
        more = self.machine.copy_milliseconds(moved)
        for override in one.overrides:
            if override.to == "float32":
                name = str(override.op).split(".", 1)[-1]
                key = name, str(override.module), str(override.phase)
                more += max(self.full_milliseconds.get(key, 0.0) - low.get(key, 0.0), 0.0)
        return more
