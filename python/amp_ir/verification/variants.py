# SPDX-License-Identifier: Apache-2.0
"""The variants of one step: float64, PyTorch's eager modes, and what amp_ir compiles."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import attrs
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from amp_ir.api.replay import run_on
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.step_module import Role, StepModule
from amp_ir.runtime.program import Program
from amp_ir.verification.gradients import inputs_of
from amp_ir.verification.kept_state import kept_state
from amp_ir.verification.outcome import Outcome
from amp_ir.verification.recorded_step import Owners


@attrs.frozen(eq=False)
class Captured:
    """A recorded step as it was captured, its batch as tensors, and its owners."""

    mod: StepModule
    batch: Sequence[torch.Tensor]
    owners: Owners
    scalers: list[Any]

    def inputs(self) -> list[torch.Tensor]:
        """Return the inputs of `main`, copies of the state."""
        return inputs_of(self.mod, self.batch)

    def interpreted(self, mod: StepModule, **options: Any) -> Outcome:
        """Evaluate a step of the same signature by the interpreter."""
        return self._outcome(mod, interpret(mod, self.inputs(), **options))

    def ran(self, program: Program, mod: StepModule) -> Outcome:
        """Run what was compiled of a step of the same signature on copies of the state."""
        return self._outcome(mod, run_on(program, mod, mod.copied_state(), self.batch))

    def eager(self, step: Callable[[], Any], dtype: torch.dtype | None) -> Outcome:
        """Run the user's step by PyTorch, under its autocast unless `dtype` is None."""
        before = {k: one.detach().clone() for k, one in self.owners.parameters().items()}
        with kept_state(self.owners, self.scalers, self._written()), _autocast(before, dtype):
            returned = step()
            after = {k: one.detach().clone() for k, one in self.owners.parameters().items()}
        return Outcome.of(returned, before, after)

    def _written(self) -> list[torch.Tensor]:
        """Return the buffers that the step updates, some of which are in no model."""
        signature = self.mod.signature
        updated = [
            signature.inputs[k] for one in signature.outputs if (k := one.updates) is not None
        ]
        held = [self.mod.state.get(one.name) for one in updated if one.role is Role.BUFFER]
        return [one for one in held if isinstance(one, torch.Tensor)]

    def _outcome(self, mod: StepModule, outputs: Sequence[torch.Tensor]) -> Outcome:
        specs, inputs = mod.signature.outputs, mod.signature.inputs
        pairs = list(zip(specs, outputs, strict=True))
        results = [value for spec, value in pairs if spec.role is Role.RESULT]
        before = {k: one.detach() for k, one in self.owners.parameters().items()}
        after = dict(before)
        for spec, value in pairs:
            if spec.role is Role.PARAMETER and spec.updates is not None:
                after[inputs[spec.updates].name] = value
        return Outcome.of(mod.signature.unflatten_results(results), before, after)


@contextlib.contextmanager
def _autocast(parameters: Any, dtype: torch.dtype | None) -> Iterator[None]:
    """Run what is inside under torch.autocast, but the backward pass, as PyTorch recommends.

    Low copies of weights are forgotten where a region around the forward pass would end, and where
    an optimizer steps: else the generator of a GAN would see the discriminator of before its step.
    """
    if dtype is None:
        yield
        return
    device = next((one.device.type for one in parameters.values()), "cpu")

    def outside(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            torch.clear_autocast_cache()
            with torch.autocast(device, enabled=False):
                return function(*args, **named)

        return call

    stack = contextlib.ExitStack()
    hook = register_optimizer_step_post_hook(lambda *_: torch.clear_autocast_cache())
    stack.callback(hook.remove)
    with (
        stack,
        mock.patch.object(torch.autograd, "backward", outside(torch.autograd.backward)),
        mock.patch.object(torch.autograd, "grad", outside(torch.autograd.grad)),
        torch.autocast(device, dtype),
    ):
        yield
