# SPDX-License-Identifier: Apache-2.0
"""Runs a captured step with PyTorch, as the compiled step runs it: the tests' reference."""

from __future__ import annotations

from typing import Any

import torch

from amp_ir.ir.captured_step import CapturedStep
from amp_ir.ir.step_module import Role


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
            values = captured.graph(*inputs)
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
