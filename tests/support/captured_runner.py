# SPDX-License-Identifier: Apache-2.0
"""Runs a captured step with PyTorch, as the compiled step runs it: the tests' reference."""

from __future__ import annotations

from typing import Any

import torch

from amp_ir.ir.captured_step import CapturedStep
from amp_ir.ir.step_module import Role


class _Interpreter(torch.fx.Interpreter):
    """Runs a graph; an op that wants a number where the graph has a tensor [] gets its value."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call one op."""
        if isinstance(target, torch._ops.OpOverload):
            of_tensors = {a.name for a in target._schema.arguments if "Tensor" in str(a.type)}

            def passed(name: str, value: Any) -> Any:
                is_number = isinstance(value, torch.Tensor) and name not in of_tensors
                return value.item() if is_number else value

            names = [argument.name for argument in target._schema.arguments]
            args = tuple(map(passed, names, args))
            kwargs = {name: passed(name, value) for name, value in kwargs.items()}
        return super().call_function(target, args, kwargs)


class CapturedRunner:
    """A CapturedStep that can be called as the user's step is."""

    def __init__(self, captured: CapturedStep) -> None:
        self.captured = captured
        captured.hooks.install_state()

    def __call__(self, *batch: Any) -> Any:
        """Run the step once on the user's tensors."""
        captured = self.captured
        tensors = iter(captured.flatten_batch(batch))
        inputs = [self._value(entry, tensors) for entry in captured.inputs]
        with torch.no_grad():
            values = _Interpreter(captured.graph).run(*inputs)
            results, gradients = [], []
            for output, value in zip(captured.outputs, values, strict=True):
                if output.role is Role.RESULT:
                    results.append(value)
                elif output.updates is None:
                    gradients.append(value)
                else:
                    inputs[output.updates].copy_(value)
        captured.hooks.after_step(gradients)
        return captured.unflatten_results(results)

    @staticmethod
    def _value(entry: Any, batch: Any) -> torch.Tensor:
        if entry.role is Role.BATCH:
            return next(batch)
        found = entry.tensor_or_reader
        return found.detach() if isinstance(found, torch.Tensor) else found()
