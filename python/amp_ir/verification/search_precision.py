# SPDX-License-Identifier: Apache-2.0
"""`amp_ir.search_precision`: the cheapest cast plan whose gradient error is within a budget.

plan_search.py tries plans by their estimated cost. What it found is then compiled and timed beside
the plans that the user had without a search, and the fastest one within the budget is returned: an
estimate alone may be wrong about which of two plans is faster.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from amp_ir.amp.overrides import Override, listed
from amp_ir.errors import AmpIrError, OptionError
from amp_ir.host.machine_model import MachineModel
from amp_ir.ir.options import batch_of, check_module
from amp_ir.ir.public_function import public_function
from amp_ir.ir.step_module import StepModule
from amp_ir.verification.error_report import check_seconds, low_dtype_name
from amp_ir.verification.estimated_machine import estimated_machine
from amp_ir.verification.measured_plans import measure_plans
from amp_ir.verification.plan_choices import Tried
from amp_ir.verification.plan_evaluation import PlanEvaluation
from amp_ir.verification.plan_search import PlanSearch
from amp_ir.verification.precision_search import (
    BEGUN,
    CONSERVATIVE,
    FLOAT32,
    OBJECTIVES,
    SEARCHED,
    Candidate,
    ComparedPlan,
    GivenBack,
    PrecisionSearch,
    best_within,
)


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
    measure: bool = True,
    progress: bool = True,
    gpu: str | None = None,
    allow_tf32: bool = False,
    machine: MachineModel | None = None,
) -> PrecisionSearch:
    """Search the cheapest plan whose gradients are within `max_error` of float64's.

    An interrupt (Ctrl-C) or the end of `seconds` gives the best plan so far. Errors are those of
    the interpreter, which rounds wherever the plan says: compiled, the step rounds no more. Nothing
    of yours changes.

    Args:
        mod: what `trace_step` returns, before autocast.
        args: the example batch.
        max_error: the largest relative error of all gradients together, in the 2-norm.
            For a step without gradients, of its results.
        objective: "time", or "memory", the planned peak. The time of a plan is estimated as
            `advise` does, from the arithmetic and bytes of its calls at the machine's rates.
        amp_dtype: "bfloat16" or "float16".
        batches: more batches; the error of a plan is the largest of all.
        overrides: as for `autocast`, as is `policy`: what the search begins with. From "default"
            it begins a second time with "conservative", under which only products are low.
        seconds: when to stop searching; what is evaluated then is finished.
        measure: whether to compile, at the end, the plan of the least estimated time, those that
            the search began with and the step in float32, to time them in turns, some seconds, and
            to return the fastest within the budget; without it the estimates decide. Times of
            another machine, peaks, and steps of several ranks are never measured.
        progress: whether to show on a terminal what is tried; off a terminal nothing is shown.
        gpu: as for `advise`, as is `allow_tf32`: estimate for this GPU by its published peaks.
        machine: the rates to estimate with; by default those of `gpu`, or measured here.

    Raises:
        OptionError: an option has a value that it does not accept, the step went through autocast,
            not even its float32 gradients are within the budget, or it has neither gradients nor
            floating-point results.
        ArgumentError: a batch is not like the captured one, or its exact gradients are not finite
            or all 0.
    """
    check_module(mod, "search_precision")
    amp_dtype = low_dtype_name(amp_dtype)
    if mod.plan is not None:
        raise OptionError("the step went through autocast; give search_precision the one before")
    if objective not in OBJECTIVES:
        accepted = " or ".join(map(repr, OBJECTIVES))
        raise OptionError(f"objective={objective!r} is not known; expected {accepted}")
    check_seconds(seconds)
    if not isinstance(max_error, int | float) or not 0.0 < max_error < 1.0:
        raise OptionError(
            f"max_error={max_error!r}; expected a relative error between 0 and 1, such as 5e-3"
        )
    started = time.perf_counter()
    flat = [batch_of(mod, one) for one in (args, *batches)]
    options: dict[str, Any] = {"amp_dtype": amp_dtype, "overrides": tuple(listed(overrides))}
    policies = ("default", CONSERVATIVE) if policy == "default" else (policy,)
    if machine is None:
        machine = estimated_machine(mod, gpu, allow_tf32=allow_tf32)
    until = started + seconds
    with _shown(progress) as show:
        plans = PlanEvaluation(
            mod, flat, options, objective=objective, machine=machine, until=until, show=show
        )
        if not plans.full.error <= max_error:
            raise OptionError(
                f"max_error={max_error:g}, but in float32 the gradient error of this step is "
                f"{plans.full.error:.1e} already; give a larger budget"
            )
        search = PlanSearch(plans, max_error)
        search.run(policies, until)
        comparison = _Comparison(plans, search, policies)
        reason = _not_measured(mod, objective, measure, gpu, search)
        if not reason:
            comparison.measure(flat[0])
        else:
            comparison.how = reason
    return _result(comparison, started)


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


def _not_measured(
    mod: StepModule, objective: str, measure: bool, gpu: str | None, search: PlanSearch
) -> str:
    """Return why plans are not measured; "" where they are."""
    ranks = mod.hooks.ranks
    if objective != "time":
        return "planned, not measured"
    if gpu is not None:
        return f"estimated for {gpu}, not measured"
    if not measure:
        return "estimated, not measured (measure=False)"
    if ranks is not None and ranks.exchanges:
        return "estimated, not measured: the step exchanges gradients with other ranks"
    return ""


class _Comparison:
    """The plan that the search found beside those that it began with, and the step in float32."""

    def __init__(self, plans: PlanEvaluation, search: PlanSearch, policies: Sequence[str]) -> None:
        self.plans, self.search, self.policies = plans, search, policies
        self.how = ""
        begun = [search.tried[policy, ()] for policy in policies if (policy, ()) in search.tried]
        found = dict(zip((BEGUN, CONSERVATIVE), begun, strict=False))
        if search.best is not None and search.best not in begun:
            found[SEARCHED] = search.best
        self.tried: dict[str, Tried] = found
        self.rows = [
            *(ComparedPlan(name, *self._numbers(one.candidate)) for name, one in found.items()),
            ComparedPlan(FLOAT32, *self._numbers(plans.full)),
        ]

    def _numbers(self, one: Candidate) -> tuple[float, float, bool]:
        return one.error, one.cost, one.error <= self.search.max_error

    def measure(self, batch: Sequence[torch.Tensor]) -> None:
        """Time the plans; where that stops, say why, and leave the choice to the estimates."""
        full = self.plans.mod
        # A plan that casts nothing is the step in float32: no noise decides between the two.
        steps = {n: one.evaluated.mod if one.casts else full for n, one in self.tried.items()}
        steps[FLOAT32] = full
        try:
            measured = measure_plans(steps, batch, self.plans.show)
        except KeyboardInterrupt:
            self.how = "estimated: measuring was interrupted"
        except AmpIrError as error:
            self.how = f"estimated: measuring failed, {error}"
        else:
            times = measured.milliseconds
            self.rows = [attrs.evolve(r, milliseconds=times[r.name]) for r in self.rows]
            self.how = f"measured: {measured}"


def _result(comparison: _Comparison, started: float) -> PrecisionSearch:
    plans, search = comparison.plans, comparison.search
    rows = tuple(comparison.rows)
    name = best_within(rows).name
    chosen = comparison.tried.get(name)
    mod: StepModule | None = None
    overrides: tuple[Override, ...] = ()
    given_back: list[GivenBack] = []
    if chosen is not None:
        mod = chosen.evaluated.mod
        overrides = plans.all_overrides(chosen.key[1])
        if chosen.choices:
            overrides, mod = plans.without_idle(chosen)
            given_back = sorted(search.given_back(chosen), key=lambda one: -one.cost)
    return PrecisionSearch(
        mod=mod,
        amp_dtype=plans.options["amp_dtype"],
        objective=plans.objective,
        max_error=search.max_error,
        found=plans.full if chosen is None else chosen.candidate,
        default=search.tried[comparison.policies[0], ()].candidate,
        full=plans.full,
        given_back=tuple(given_back),
        overrides=overrides,
        policy=comparison.policies[0] if chosen is None else chosen.policy,
        compared=rows,
        returned=name,
        how_compared=comparison.how,
        machine=plans.machine.name,
        batches=len(plans.exact),
        plans=len(search.tried),
        seconds=time.perf_counter() - started,
        is_complete=search.is_complete,
    )
