# SPDX-License-Identifier: Apache-2.0
"""One evaluation of a step by the interpreter, with what is not finite in each of its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import attrs
import torch
from tvm import relax

from amp_ir.ir.dataflow import Dataflow, variables_of
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.step_log import SKIPS
from amp_ir.ir.step_module import Role, StepModule

_ALL_FINITE = "amp_ir.all_finite"
_COUNTS = ".counts"


@attrs.frozen
class Extent:
    """What one tensor holds: infinities, NaN, and the largest magnitude among its finite values."""

    has_infinity: bool
    has_nan: bool
    largest: float

    @property
    def is_finite(self) -> bool:
        """Return whether there is neither infinity nor NaN."""
        return not (self.has_infinity or self.has_nan)


FINITE = Extent(False, False, 0.0)


def extent_of(value: torch.Tensor) -> Extent:
    """Return the extent of a tensor; integers are finite."""
    if not value.is_floating_point() or not value.numel():
        return FINITE
    magnitudes = value.detach().abs()
    largest = float(magnitudes.max())
    if largest < float("inf"):
        return Extent(False, False, largest)
    finite = torch.nan_to_num(magnitudes, nan=0.0, posinf=0.0)
    is_nan = bool(torch.isnan(magnitudes).any())
    return Extent(bool(torch.isinf(magnitudes).any()), is_nan, float(finite.max()))


@attrs.frozen(eq=False)
class ObservedRun:
    """The extents of a step's values, by variable, and the sinks that are not finite.

    A sink is what decides whether a step is good: a tensor that a loss scaler checks, or an output
    that is not the scaler's own.
    """

    flow: Dataflow
    extents: Mapping[relax.Var, Extent]
    sinks: tuple[relax.Var, ...]
    checked: int

    @property
    def is_finite(self) -> bool:
        """Return whether every sink is finite."""
        return not self.sinks

    def result_names(self, mod: StepModule) -> dict[relax.Var, str]:
        """Return the names of the outputs, by the variable that each one is."""
        return {one: name for name, one in _results(mod, self.flow)}


def observe(
    mod: StepModule,
    inputs: Sequence[torch.Tensor],
    *,
    unrounded: Set[relax.Var] = frozenset(),
    made_finite: Set[relax.Var] = frozenset(),
) -> ObservedRun:
    """Evaluate a step without loops; `made_finite` are bound with 0 for infinity and NaN."""
    flow = Dataflow(mod.ir)
    extents = {}
    inputs = [
        _with_zeros(value) if parameter in made_finite else value
        for parameter, value in zip(flow.main.params, inputs, strict=True)
    ]
    for parameter, value in zip(flow.main.params, inputs, strict=True):
        extents[parameter] = extent_of(value)

    def note(variable: relax.Var, value: torch.Tensor) -> torch.Tensor:
        if variable in made_finite:
            value = _with_zeros(value)
        extents[variable] = extent_of(value)
        return value

    interpret(mod, inputs, on_value=note, unrounded=unrounded)
    checked = _checked(flow)
    ends = (*checked, *(one for _, one in _results(mod, flow)))
    sinks = dict.fromkeys(one for one in ends if not extents.get(one, FINITE).is_finite)
    return ObservedRun(flow, extents, tuple(sinks), len(checked))


def _with_zeros(value: torch.Tensor) -> torch.Tensor:
    # Not the largest number, which would overflow in the next op.
    return torch.nan_to_num(value, nan=0.0, posinf=0.0, neginf=0.0)


def _checked(flow: Dataflow) -> list[relax.Var]:
    """Return the tensors that loss scalers check; the last argument of a check is the scale."""
    calls = flow.calls(_ALL_FINITE).values()
    return [one for call in calls for one in variables_of(call)[:-1]]


def _results(mod: StepModule, flow: Dataflow) -> list[tuple[str, relax.Var]]:
    """Return the names and variables of what a step returns, but for the scaler's state."""
    specs = mod.signature.outputs
    return [
        (spec.name, field)
        for field, spec in zip(flow.fields, specs, strict=True)
        if isinstance(field, relax.Var) and spec.role is not Role.SCALER_STATE
    ]


def non_finite_outputs(
    mod: StepModule, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> tuple[str, ...]:
    """Return what says that a step went wrong: its outputs that are not finite, and skips.

    `inputs` and `outputs` are those of `main`, in order.
    """
    found = []
    for spec, value in zip(mod.signature.outputs, outputs, strict=True):
        if spec.role is not Role.SCALER_STATE:
            if not extent_of(value).is_finite:
                found.append(spec.name)
        elif spec.updates is not None and spec.name.endswith(_COUNTS):
            before = inputs[spec.updates]
            if int(value[SKIPS]) > int(before[SKIPS]):
                found.append(f"{spec.name.removesuffix(_COUNTS)} skipped the step")
    return tuple(found)
