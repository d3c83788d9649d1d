# SPDX-License-Identifier: Apache-2.0
"""`amp_ir.search_precision`: the cheapest cast plan whose gradient error is within a budget.

An error budget with costs is a knapsack. Roundings of different ops are nearly independent, so that
their errors add up about as squares do: whoever buys most error for its cost is given back first.
That only orders the choices. Whether a plan is within the budget is decided by evaluating it, on
every batch, against float64.

1. The plan of autocast, all of whose free ops the minimum cut decides. Within the budget: done.
2. The error that each op's roundings make alone (contributions.py), and what float32 costs there.
3. The shortest beginning of that list, by error over cost, that is within the budget, by bisection;
   autocast decides the rest anew around what is given back. If all of it is not enough, 2 and 3 are
   repeated with the roundings that are left. Once more with all that keeps matmuls low first, and
   both once more from the policy "conservative", which rounds the inputs of matmuls alone.
4. Each op that was given back is tried low again, the most expensive first, and stays so if the
   plan is still within the budget.

The best plan so far is kept throughout: time, or an interrupt, ends the search with that.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from amp_ir.amp.kernels import LIBRARY
from amp_ir.amp.override_texts import describe
from amp_ir.amp.overrides import Override, QuietOverride, listed
from amp_ir.api.estimate import estimate_step
from amp_ir.api.precision import autocast
from amp_ir.errors import OptionError
from amp_ir.host.peak_rates import MachinePeaks, measure_peaks
from amp_ir.ir.options import batch_of, check_module
from amp_ir.ir.public_function import public_function
from amp_ir.ir.step_module import StepModule
from amp_ir.rewrites.unroll_loops import unroll_loops
from amp_ir.verification.contributions import Contribution, contributions
from amp_ir.verification.error_report import low_dtype_name
from amp_ir.verification.gradients import StepGradients
from amp_ir.verification.outcome import relative_error
from amp_ir.verification.precision_search import (
    OBJECTIVES,
    Candidate,
    GivenBack,
    PrecisionSearch,
)

# How often roundings that a plan leaves are measured again.
_ROUNDS = 4
# A policy, and what is given back.
_Key = tuple[str, tuple[Override, ...]]
# Of the time, for measuring single ops.
_MEASURING_SHARE = 0.5


@public_function("amp_ir.search_precision")
def search_precision(
    mod: StepModule,
    args: tuple[Any, ...],
    *,
    max_error: float,
    objective: str = "time",
    amp_dtype: str | torch.dtype = "bfloat16",
    batches: Sequence[tuple[Any, ...]] = (),
    overrides: Sequence[Override] = (),
    policy: str = "default",
    seconds: float = 300.0,
    progress: bool = True,
    peaks: MachinePeaks | None = None,
) -> PrecisionSearch:
    """Search the cheapest plan whose gradients are within `max_error` of float64's.

    An interrupt (Ctrl-C) or the end of `seconds` gives the best plan so far. The step runs in the
    interpreter, which rounds wherever the plan says: compiled, it rounds no more. Nothing of yours
    changes.

    Args:
        mod: what `trace_step` returns, before autocast.
        args: the example batch.
        max_error: the largest relative error of all gradients together, in the 2-norm.
            For a step without gradients, of its results.
        objective: "time", estimated from the arithmetic and bytes of the planned kernels at the
            machine's measured peaks; or "memory", the planned peak.
        amp_dtype: "bfloat16" or "float16".
        batches: more batches; the error of a plan is the largest of all.
        overrides: as for `autocast`, as is `policy`: what the search begins with. From "default"
            it begins a second time with "conservative", under which only products are low.
        seconds: when to stop; what is evaluated then is finished.
        progress: whether to show on a terminal what is tried; off a terminal nothing is shown.
        peaks: the machine that time is estimated for; measured if not given.

    Raises:
        OptionError: an option has a value that it does not accept, the step went through autocast,
            or not even its float32 gradients are within the budget.
        ArgumentError: a batch is not like the captured one.
    """
    check_module(mod, "search_precision")
    amp_dtype = low_dtype_name(amp_dtype)
    if mod.plan is not None:
        raise OptionError("the step went through autocast; give search_precision the one before")
    if objective not in OBJECTIVES:
        accepted = " or ".join(map(repr, OBJECTIVES))
        raise OptionError(f"objective={objective!r} is not known; expected {accepted}")
    if not 0.0 < max_error < 1.0:
        raise OptionError(
            f"max_error={max_error!r}; expected a relative error between 0 and 1, such as 5e-3"
        )
    flat = [batch_of(mod, one) for one in (args, *batches)]
    options: dict[str, Any] = {"amp_dtype": amp_dtype, "overrides": tuple(listed(overrides))}
    policies = ("default", "conservative") if policy == "default" else (policy,)
    if peaks is None:
        peaks = measure_peaks()
    with _shown(progress) as show:
        search = _Search(mod, flat, options, policies, max_error, objective, peaks, show)
        return search.run(seconds)


@contextlib.contextmanager
def _shown(progress: bool) -> Iterator[Callable[[str], None]]:
    """Give the function that shows what is tried; it does nothing off a terminal."""
    console = Console(stderr=True)
    if not (progress and console.is_terminal):
        yield lambda _text: None
        return
    columns = (BarColumn(20), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("evaluating in float64", total=None)
        yield lambda text: bar.update(task, description=text)


@attrs.frozen(eq=False)
class _Choice:
    """Roundings that may be given back, and about what that costs."""

    contribution: Contribution
    cost: float

    @property
    def overrides(self) -> tuple[Override, ...]:
        return self.contribution.overrides

    @property
    def ratio(self) -> float:
        """How much error it makes for what it costs in float32."""
        return self.contribution.error**2 / self.cost

    @property
    def needs_arithmetic(self) -> bool:
        """Whether a library would have to multiply in float32."""
        return any(one.to == "float32" and one.op in LIBRARY for one in self.overrides)


@attrs.frozen(eq=False)
class _Tried:
    """A plan that was evaluated: what it gives back, its step and its numbers."""

    key: _Key
    choices: tuple[_Choice, ...]
    overrides: tuple[Override, ...]
    mod: StepModule
    candidate: Candidate
    worst_batch: int

    @property
    def rank(self) -> tuple[float, int]:
        """The cost, and of equal ones how much is given back."""
        # Times of equal kernels are added up in another order.
        return float(f"{self.candidate.cost:.9g}"), len(self.choices)


class _EndedError(Exception):
    """The time is over."""


class _Search:
    def __init__(
        self,
        mod: StepModule,
        batches: Sequence[Any],
        options: dict[str, Any],
        policies: Sequence[str],
        max_error: float,
        objective: str,
        peaks: MachinePeaks,
        show: Callable[[str], None],
    ) -> None:
        self.mod, self.options, self.policies = mod, options, policies
        self.max_error, self.objective = max_error, objective
        self.peaks, self.show = peaks, show
        self.gradients = StepGradients(mod, batches)
        self.exact = [self.gradients.exact(k) for k in range(len(batches))]
        self.tried: dict[_Key, _Tried] = {}
        self.measured: dict[_Key, list[_Choice]] = {}
        self.best: _Tried | None = None
        self.until = math.inf

    def run(self, seconds: float) -> PrecisionSearch:
        """Search until nothing is left to try, time is over, or the user interrupts."""
        started = time.perf_counter()
        self.until = started + seconds
        estimate = estimate_step(self.mod, self.peaks)
        self.full_milliseconds = estimate.milliseconds_of()
        cost = estimate.milliseconds if self.objective == "time" else float(estimate.peak_nbytes)
        full = Candidate(self._error(self.gradients.mod)[0], cost)
        if full.error > self.max_error:
            raise OptionError(
                f"max_error={self.max_error:g}, but in float32 the gradient error of this step is "
                f"{full.error:.1e} already; give a larger budget"
            )
        default = self.evaluated((), self.policies[0])
        is_complete = True
        try:
            for policy in self.policies:
                self._search(self.evaluated((), policy))
                if self.is_within(default):
                    break
        except (KeyboardInterrupt, _EndedError):
            is_complete = False
        best = self.best
        if best is not None and best.candidate.cost >= full.cost:
            best = None
        if best is not None and best.choices:
            best = self._without_idle(best)
        return PrecisionSearch(
            mod=None if best is None else best.mod,
            amp_dtype=self.options["amp_dtype"],
            objective=self.objective,
            max_error=self.max_error,
            found=full if best is None else best.candidate,
            default=default.candidate,
            full=full,
            given_back=tuple(
                sorted(() if best is None else self._given_back(best), key=lambda one: -one.cost)
            ),
            overrides=() if best is None else best.overrides,
            policy=self.policies[0] if best is None else best.key[0],
            batches=len(self.exact),
            plans=len(self.tried),
            seconds=time.perf_counter() - started,
            is_complete=is_complete,
        )

    def _search(self, default: _Tried) -> None:
        if self.is_within(default):
            return
        for keeps_arithmetic in (False, True):
            last = default
            for _ in range(_ROUNDS):
                choices = self._choices(last)
                if keeps_arithmetic:
                    choices.sort(key=lambda one: one.needs_arithmetic)
                last = self._shortest(last, choices)
                if self.is_within(last):
                    self._pruned(last)
                    break

    def is_within(self, tried: _Tried) -> bool:
        return tried.candidate.error <= self.max_error

    def evaluated(self, choices: tuple[_Choice, ...], policy: str) -> _Tried:
        """Return the plan that gives back some choices, with its error and cost."""
        key = policy, _joined(choices)
        if key in self.tried:
            return attrs.evolve(self.tried[key], choices=choices)
        if time.perf_counter() > self.until and self.tried:
            raise _EndedError
        self.show(f"plan {len(self.tried) + 1}: {len(choices)} given back{self._so_far()}")
        overrides = (*self.options["overrides"], *key[1])
        low = self._autocast(map(QuietOverride.of, overrides), policy)
        error, worst = self._error(low.with_ir(unroll_loops(low.ir)))
        estimate = estimate_step(low, self.peaks)
        cost = estimate.milliseconds if self.objective == "time" else float(estimate.peak_nbytes)
        tried = _Tried(key, choices, overrides, low, Candidate(error, cost), worst)
        self.tried[key] = tried
        if self.is_within(tried) and (self.best is None or tried.rank < self.best.rank):
            self.best = tried
        return tried

    def _autocast(self, overrides: Iterable[Override], policy: str) -> StepModule:
        options = {**self.options, "overrides": tuple(overrides), "policy": policy}
        low: StepModule = autocast(self.mod, **options)
        return low

    def _without_idle(self, best: _Tried) -> _Tried:
        """Return a plan without the overrides that change nothing beside the others."""
        policy = best.key[0]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            self._autocast(best.overrides, policy)
        texts = [str(one.message) for one in said]
        needed = tuple(
            one
            for one in best.overrides
            if not any(text.startswith(f"{describe(one)} changes nothing") for text in texts)
        )
        mod = self._autocast(map(QuietOverride.of, needed), policy)
        before, after = best.mod.plan, mod.plan
        if before is not None and after is not None and not before.diff(after):
            return attrs.evolve(best, overrides=needed, mod=mod)
        return best

    def _so_far(self) -> str:
        if self.best is None:
            return ""
        found = self.best.candidate
        return f"; best so far: error {found.error:.1e}, {len(self.best.choices)} given back"

    def _error(self, mod: StepModule) -> tuple[float, int]:
        """Return the largest error of the batches, and whose it is."""
        errors = [
            relative_error(self.gradients.evaluated(mod, k), exact)
            for k, exact in enumerate(self.exact)
        ]
        worst = max(range(len(errors)), key=lambda k: errors[k])
        return errors[worst], worst

    def _choices(self, tried: _Tried) -> list[_Choice]:
        """Return what else a plan may give back, whoever makes most error for its cost first."""
        if tried.key in self.measured:
            return list(self.measured[tried.key])
        self.show(f"rounding ops one after the other{self._so_far()}")
        low = tried.mod.with_ir(unroll_loops(tried.mod.ir))
        left = max(self.until - time.perf_counter(), 0.0)
        found = contributions(
            low, self.gradients.inputs[tried.worst_batch], self.gradients.wanted(low),
            amp_dtype=self.options["amp_dtype"], seconds=_MEASURING_SHARE * left,
        )  # fmt: skip
        milliseconds = estimate_step(tried.mod, self.peaks).milliseconds_of()
        choices = [
            _Choice(one, self._cost(one, milliseconds))
            for one in found.parts
            if one.error > 0.0 and one.op not in ("", "amp_ir.cast")
        ]
        choices.sort(key=lambda one: (-one.ratio, one.cost))
        self.measured[tried.key] = choices
        return list(choices)

    def _cost(self, one: Contribution, low: dict[tuple[str, str, str], float]) -> float:
        """Return about what it costs to give roundings back."""
        moved = 2.0 * one.elements
        if self.objective == "memory":
            return moved
        more = moved / self.peaks.gigabytes_per_second / 1e6
        for override in one.overrides:
            if override.to == "float32":
                name = str(override.op).split(".", 1)[-1]
                key = name, str(override.module), str(override.phase)
                more += max(self.full_milliseconds.get(key, 0.0) - low.get(key, 0.0), 0.0)
        return more

    def _shortest(self, last: _Tried, choices: Sequence[_Choice]) -> _Tried:
        """Return the plan of the shortest beginning of the list that is within the budget.

        All of the list if that is not enough.
        """
        low, high = 0, len(choices)
        policy = last.key[0]
        everything = self.evaluated((*last.choices, *choices), policy)
        if not self.is_within(everything):
            return everything
        found = everything
        while high - low > 1:
            middle = (low + high) // 2
            tried = self.evaluated((*last.choices, *choices[:middle]), policy)
            if self.is_within(tried):
                high, found = middle, tried
            else:
                low = middle
        return found

    def _pruned(self, tried: _Tried) -> None:
        """Try each choice low again, the most expensive first, until none can be."""
        was: _Tried | None = None
        while tried is not was:
            was = tried
            for one in sorted(tried.choices, key=lambda choice: -choice.cost):
                rest = tuple(c for c in tried.choices if c is not one)
                without = self.evaluated(rest, tried.key[0])
                if self.is_within(without) and without.rank < tried.rank:
                    tried = without

    def _given_back(self, best: _Tried) -> Iterator[GivenBack]:
        """Yield each choice of a plan, with what it changes if that was evaluated."""
        for one in best.choices:
            rest = _joined([c for c in best.choices if c is not one])
            without = self.tried.get((best.key[0], rest))
            part = one.contribution
            if without is None:
                yield GivenBack(part.name, part.error, None, one.cost, one.overrides)
            else:
                more = best.candidate.cost - without.candidate.cost
                error = without.candidate.error
                yield GivenBack(part.name, part.error, error, more, one.overrides)


def _joined(choices: Sequence[_Choice]) -> tuple[Override, ...]:
    """Return the overrides of choices, in one order; one that reads float32 includes its result."""
    found = {one for choice in choices for one in choice.overrides}
    kept = [
        one for one in found if one.to == "float32" or attrs.evolve(one, to="float32") not in found
    ]
    return tuple(sorted(kept, key=lambda one: (one.module, one.phase, one.op)))
