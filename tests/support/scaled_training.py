# SPDX-License-Identifier: Apache-2.0
"""A training under a loss scale whose step a test writes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import nn
from torch.nn import functional
from tvm import relax

import amp_ir
from amp_ir.ir.interpreter import interpret
from amp_ir.loss_scaling.degrees.check_scale_degrees import ScaleDegrees, check_scale_degrees
from amp_ir.loss_scaling.degrees.degree import Degree, Special, Unknown
from scale_programs import FACTOR, grows_as


@attrs.define(eq=False)
class Training:
    """A model, its optimizer and scaler, and a batch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: amp_ir.GradScaler
    batch: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def make(cls, optimizer: type[torch.optim.Optimizer], **options: Any) -> Training:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3)
        )
        batch = (torch.randn(4, 6), torch.randint(0, 3, (4,)))
        return cls(model, optimizer(model.parameters(), **options), amp_ir.GradScaler(), batch)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.model(x), y)

    def scaled_backward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(x, y)
        self.scaler.scale(loss).backward()
        return loss

    def end(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def clip(self, max_norm: Any) -> Any:
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def capture(self, program: Callable[..., Any]) -> tuple[amp_ir.StepModule, ScaleDegrees]:
        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            return program(self, x, y)

        mod, _ = amp_ir.trace_step(
            step, self.batch, model=self.model, optimizer=self.optimizer, scaler=self.scaler
        )
        return mod, check_scale_degrees(mod)

    def degrees(self, program: Callable[..., Any]) -> ScaleDegrees:
        return self.capture(program)[1]


def line_of(program: Callable[..., Any], mark: str) -> str:
    """`file:line` of the line of `program` that ends in `# here`, or in another mark."""
    lines, first = inspect.getsourcelines(program)
    file = inspect.getsourcefile(program)
    return f"{file}:{first + next(k for k, text in enumerate(lines) if f'# {mark}' in text)}"


def inputs_at(mod: amp_ir.StepModule, batch: Any, scale: float) -> list[torch.Tensor]:
    """The inputs of a captured step, with another loss scale."""
    tensors = iter(mod.signature.flatten_batch(batch))
    inputs = []
    for spec in mod.signature.inputs:
        value = mod.state[spec.name] if spec.is_state else next(tensors)
        value = value.detach().clone() if isinstance(value, torch.Tensor) else value()
        inputs.append(torch.full_like(value, scale) if spec.name.endswith(".scale") else value)
    return inputs


def count_growing(training: Training, program: Callable[..., Any]) -> tuple[int, int]:
    """Check each value of a step, in float64 at two scales; (how many, how many are unknown)."""
    mod, found = training.capture(program)
    values: list[dict[str, torch.Tensor]] = [{}, {}]
    for scale, seen in zip((1024.0, 1024.0 * FACTOR), values, strict=True):

        def keep(
            var: relax.Var, value: torch.Tensor, seen: dict[str, torch.Tensor] = seen
        ) -> torch.Tensor:
            seen[var.name] = value.clone()
            return value

        inputs = inputs_at(mod, training.batch, scale)
        interpret(mod, inputs, on_value=keep, float_dtype=torch.float64)
    checked = 0
    for name, before in values[0].items():
        degree = found.degree.get(name)
        if isinstance(degree, Degree) or degree is Special.ANY:
            checked += 1
            assert grows_as(before, values[1][name], degree), (name, degree)
    return checked, sum(isinstance(degree, Unknown) for degree in found.degree.values())
