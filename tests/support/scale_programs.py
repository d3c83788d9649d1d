# SPDX-License-Identifier: Apache-2.0
"""Small steps with a loss scale, made by a builder: one input a tensor, and the scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import tvm
from tvm import relax
from tvm.relax import op

from amp_ir.dialect.define import dtype_name
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.location import Location, to_span
from amp_ir.ir.step_module import InputSpec, OutputSpec, Role, Signature, StepModule
from amp_ir.loss_scaling.degrees.degree import Degree, Special

# From scale 1 to 16: k**d of a quarter, or a half, or a whole power is exact in binary.
FACTOR = 16.0
ZEROS = "zeros"
Body = Callable[[relax.BlockBuilder, list[relax.Var], list[relax.Var]], Any]


class Steps:
    """Inputs and outputs of a step under construction, by name."""

    def __init__(self, *scalers: str) -> None:
        self.builder = relax.BlockBuilder()
        self.specs: list[InputSpec] = []
        self.vars: list[relax.Var] = []
        self.scales = [
            self.input(f"{name}.scale", Role.SCALER_STATE, ()) for name in scalers or ("scaler0",)
        ]

    def input(
        self, name: str, role: Role, shape: Sequence[int], dtype: str = "float32"
    ) -> relax.Var:
        """One more input of `main`."""
        self.specs.append(InputSpec(name, role, tuple(shape), dtype))
        safe = "".join(c if c.isalnum() else "_" for c in name)
        self.vars.append(relax.Var(f"p_{safe}", relax.TensorType(list(shape), dtype)))
        return self.vars[-1]

    def finish(
        self, body: Callable[[relax.BlockBuilder], dict[tuple[str, Role], relax.Expr]]
    ) -> StepModule:
        """The step whose outputs `body` emits; one named as an input updates that input."""
        positions = {spec.name: k for k, spec in enumerate(self.specs)}
        with self.builder.function("main", self.vars):
            with self.builder.dataflow():
                named = body(self.builder)
                fields = [self.builder.emit(one) for one in named.values()]
                result = self.builder.emit_output(relax.Tuple(fields))
            self.builder.emit_func_output(result)
        outputs = tuple(
            OutputSpec(
                name,
                role,
                tuple(int(n) for n in field.ty.shape),
                str(field.ty.dtype),
                positions.get(name),
            )
            for (name, role), field in zip(named, fields, strict=True)
        )
        signature = Signature(tuple(self.specs), outputs, list, tuple)
        return StepModule(self.builder.get(), signature, {})


def at(call: relax.Call, phase: str, line: int, module: str = "") -> relax.Call:
    """`call` with a place in the user's program."""
    span = to_span(Location(module, phase, "train.py", line))  # type: ignore[arg-type]
    return relax.Call(call.op, list(call.args), call.attrs, list(call.ty_args), span)


def scaled(builder: relax.BlockBuilder, x: Any, scale: relax.Var, degree: int | str) -> Any:
    """`x` multiplied by `scale**degree`, or by 0."""
    if degree == ZEROS:
        return builder.emit(op.multiply(x, relax.const(0.0, str(x.ty.dtype))))
    for _ in range(abs(int(degree))):
        x = builder.emit((op.multiply if int(degree) > 0 else op.divide)(x, scale))
    return x


def call_step(
    inputs: Sequence[torch.Tensor],
    degrees: Sequence[int | str],
    call: Callable[..., relax.Expr],
) -> StepModule:
    """A step that returns `call` of its inputs, each multiplied by the scale to its degree."""
    step = Steps()
    params = [
        step.input(f"batch{k}", Role.BATCH, tuple(one.shape), dtype_name(one))
        for k, one in enumerate(inputs)
    ]

    def body(builder: relax.BlockBuilder) -> dict[tuple[str, Role], relax.Expr]:
        arguments = [
            scaled(builder, param, step.scales[0], degree)
            for param, degree in zip(params, degrees, strict=True)
        ]
        value = builder.emit(call(*arguments))
        fields = [value]
        if isinstance(value.ty, relax.TupleType):
            fields = [relax.TupleGetItem(value, k) for k in range(len(value.ty.fields))]
        return {(f"result{k}", Role.RESULT): field for k, field in enumerate(fields)}

    return step.finish(body)


def values_at(
    step: StepModule | tvm.IRModule, inputs: Sequence[torch.Tensor], scale: float
) -> dict[str, torch.Tensor]:
    """Every value of the step by the name of its variable, in float64."""
    found: dict[str, torch.Tensor] = {}

    def keep(var: relax.Var, value: torch.Tensor) -> torch.Tensor:
        found[var.name] = value.clone()
        return value

    results = interpret(
        step,
        [torch.tensor(scale), *inputs],
        on_value=keep,
        float_dtype=torch.float64,
    )
    return {**found, **{f"result{k}": one for k, one in enumerate(results)}}


def grows_as(before: torch.Tensor, after: torch.Tensor, degree: Degree | Special) -> bool:
    """Whether a value is multiplied by FACTOR**degree, up to the rounding of float64."""
    power = 0.0
    if isinstance(degree, Degree):
        power = float(degree.power_of("scaler0"))
    elif degree is Special.ANY and bool((before.isfinite() & (before != 0)).any()):
        return False
    if not before.is_floating_point():
        return power == 0 and torch.equal(before, after)
    expected = before * FACTOR**power
    size = expected[expected.isfinite()].abs().max() if expected.isfinite().any() else 0.0
    return torch.allclose(after, expected, rtol=1e-11, atol=1e-13 * float(size), equal_nan=True)
