# SPDX-License-Identifier: Apache-2.0
"""The plan check: what kernels compute is what the plan says, op by op.

The step is compiled once more with every value as a result, rounded as the plan says. Each value is
then compared with the interpreter's on the same arguments, those that the kernels computed: a
difference is of one op, and none is handed on to the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from tvm import relax

from amp_ir.api.compile import compile_step
from amp_ir.api.replay import run_on
from amp_ir.dialect.define import LOW_DTYPES
from amp_ir.ir.dataflow import Dataflow, op_name, variables_of
from amp_ir.ir.interpreter import evaluate
from amp_ir.ir.location import from_span
from amp_ir.ir.static_shape import shape_of
from amp_ir.ir.step_module import OutputSpec, Role, StepModule
from amp_ir.verification.outcome import relative_error

# How much larger than the interpreter's own error against float64 a kernel's may be, in the 2-norm
# and for one element. In float32 sums have another order, and functions are within 4 ULP; a low
# result is rounded once by both, and differs where that begins elsewhere.
_TIMES, _TIMES_AT_MOST = {"full": 4.0, "low": 1.5}, {"full": 16.0, "low": 3.0}
# Of the largest value: what is below it is float32 rounding of intermediates.
_FLOOR = 2.0**-20
# Half of the last place of float32. Where its arguments' rounding changes a result as much, as that
# of a mean of numbers around 0, so may another order of the sum.
_ROUNDING = 2.0**-24


@attrs.frozen
class Mismatch:
    """One op whose kernel differs from the plan: the relative errors against float64."""

    op: str
    variable: str
    module: str
    phase: str
    file: str
    line: int
    dtype: str
    error: float
    expected_error: float
    reason: str = ""

    def __str__(self) -> str:
        """Say it in one line."""
        place = f"{self.module or 'step'} ({self.phase}), {self.file}:{self.line}"
        return (
            f"{self.op} -> {self.dtype} in {place}: {self.reason}; relative error "
            f"{self.error:.1e}, the plan's {self.expected_error:.1e}"
        )


@attrs.frozen
class PlanCheck:
    """How many values were compared, and those that differ."""

    compared: int
    mismatches: tuple[Mismatch, ...]

    def __str__(self) -> str:
        """Say how many differ."""
        wrong = len(self.mismatches)
        return f"Plan check: {self.compared} values, {wrong or 'none'} of them differ"


def check_plan(mod: StepModule, inputs: Sequence[torch.Tensor], batch: Sequence[Any]) -> PlanCheck:
    """Compare the kernels of a step with its plan.

    Requires: memory for all values of a step at once.
    """
    flow = Dataflow(mod.ir)
    shown = shown_values(mod)
    watched = with_results(mod, shown)
    program = compile_step(watched, rounding="strict").program
    outputs = run_on(program, watched, watched.copied_state(), batch)
    values: dict[relax.Var, torch.Tensor] = dict(zip(flow.main.params, inputs, strict=True))
    values.update(zip(shown, outputs[len(mod.signature.outputs) :], strict=True))
    found = [_compare(flow, one, values) for one in shown]
    return PlanCheck(len(shown), tuple(one for one in found if one is not None))


def shown_values(mod: StepModule) -> list[relax.Var]:
    """Return the values of a step that can be its results, in order."""
    flow = Dataflow(mod.ir)
    return [one for one in flow.values if _is_shown(flow, one)]


def with_results(mod: StepModule, shown: Sequence[relax.Var]) -> StepModule:
    """Return the step that also returns the given values, after its own outputs."""
    flow = Dataflow(mod.ir)
    specs = [
        OutputSpec(f"value{number}", Role.RESULT, tuple(shape_of(one)), str(one.ty.dtype))
        for number, one in enumerate(shown)
    ]
    output = relax.Tuple([*flow.fields, *shown])
    variable = relax.Var("outputs", output.ty)
    ir = flow.finish([*flow.bindings, relax.VarBinding(variable, output)], variable)
    signature = attrs.evolve(mod.signature, outputs=(*mod.signature.outputs, *specs))
    return attrs.evolve(mod, ir=ir, signature=signature)


def _is_shown(flow: Dataflow, variable: relax.Var) -> bool:
    value = flow.values[variable]
    is_tensor = isinstance(variable.ty, relax.TensorType)
    return is_tensor and isinstance(value, relax.Call | relax.TupleGetItem)


def _compare(
    flow: Dataflow, variable: relax.Var, values: Mapping[relax.Var, torch.Tensor]
) -> Mismatch | None:
    call, bindings = _definition(flow, variable)
    got = values[variable]
    read = {one: values[one] for one in variables_of(call)}
    expected = evaluate(variable, bindings, read)
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return _mismatch(call, variable, math.inf, 0.0, "another dtype or shape")
    if not got.is_floating_point():
        same = torch.equal(got, expected)
        return None if same else _mismatch(call, variable, math.inf, 0.0, "other integers")
    exact = evaluate(variable, bindings, read, float_dtype=torch.float64)
    got, exact = got.double(), exact.double()
    found = _compare_floats(call, variable, got, expected.double(), exact)
    if found is None or found.dtype in LOW_DTYPES:
        return found
    rounded = {one: _moved(value) for one, value in read.items()}
    moved = evaluate(variable, bindings, rounded, float_dtype=torch.float64)
    return found if _compare_floats(call, variable, got, moved.double(), exact) else None


def _moved(value: torch.Tensor) -> torch.Tensor:
    if not value.is_floating_point():
        return value
    return value.double() + value.double().abs() * _ROUNDING


def _compare_floats(
    call: relax.Call, variable: relax.Var, got: torch.Tensor, expected: torch.Tensor, exact: Any
) -> Mismatch | None:
    is_finite = torch.isfinite(expected)
    others = torch.equal(torch.isfinite(got), is_finite)
    if not others or not torch.equal(
        got[~is_finite].nan_to_num(), expected[~is_finite].nan_to_num()
    ):
        return _mismatch(call, variable, math.inf, 0.0, "other infinities or NaN")
    got, expected, exact = (one[is_finite] for one in (got, expected, exact))
    if not got.numel():
        return None
    largest = float(exact.abs().max()) or 1.0
    ours, theirs = (relative_error({0: one}, {0: exact}) for one in (got, expected))
    at_most, their_most = (float((one - exact).abs().max()) for one in (got, expected))
    kind = "low" if str(variable.ty.dtype) in LOW_DTYPES else "full"
    allowed = max(_TIMES[kind] * theirs, _FLOOR)
    allowed_most = max(_TIMES_AT_MOST[kind] * their_most, _FLOOR * largest)
    if ours > allowed and at_most > _FLOOR * largest:
        return _mismatch(call, variable, ours, theirs, "the values differ")
    if at_most > allowed_most:
        error, expected_error = at_most / largest, their_most / largest
        return _mismatch(call, variable, error, expected_error, "an element differs")
    return None


def _definition(flow: Dataflow, variable: relax.Var) -> tuple[relax.Call, list[relax.VarBinding]]:
    """Return the call that makes a variable, and the bindings that do."""
    value = flow.values[variable]
    if isinstance(value, relax.TupleGetItem):
        whole = value.tuple_value
        call = flow.values[whole]
        return call, [relax.VarBinding(whole, call), relax.VarBinding(variable, value)]
    return value, [relax.VarBinding(variable, value)]


def _mismatch(
    call: relax.Call, variable: relax.Var, error: float, expected: float, reason: str
) -> Mismatch:
    place = from_span(call.span)
    return Mismatch(
        op=op_name(call),
        variable=str(variable.name),
        module=place.module,
        phase=place.phase,
        file=place.file,
        line=place.line,
        dtype=str(variable.ty.dtype),
        error=error,
        expected_error=expected,
        reason=reason,
    )
