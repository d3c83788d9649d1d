# SPDX-License-Identifier: Apache-2.0
"""CapturedStep, the capture's result: a functional graph and the tensors that it works on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from amp_ir.ir.step_module import Role, StepHooks


@attrs.frozen(eq=False)
class NumberReader:
    """A function that reads a number of the host as a new 0-d float64 tensor.

    `value` reads the same as a float, for a caller that has memory for it.
    """

    value: Callable[[], float]

    def __call__(self) -> torch.Tensor:
        """Return the current value as a tensor."""
        return torch.tensor(self.value(), dtype=torch.float64)


@attrs.frozen
class CapturedInput:
    """One placeholder of the graph, in order.

    `tensor_or_reader` is the user's own live tensor for state (parameters, buffers, optimizer
    state), a function that returns the current tensor in `p.grad` for a gradient, a NumberReader
    for a hyper-parameter, and the example's tensor for the batch.
    """

    name: str
    role: Role
    tensor_or_reader: torch.Tensor | Callable[[], torch.Tensor] = attrs.field(eq=False)


@attrs.frozen
class CapturedOutput:
    """One field of the graph's output tuple, in order.

    `updates` is the position of the input whose tensor takes this value after the step. It is None
    for a RESULT, and for a GRADIENT of a parameter whose `grad` was not an input: that tensor goes
    to `StepHooks.after_step`, which assigns it to `p.grad`.
    """

    name: str
    role: Role
    updates: int | None = None


@attrs.frozen
class CapturedStep:
    """A step as a functional ATen graph.

    `graph` takes the inputs in order and returns a flat tuple. Each node has `meta["val"]` (fake
    tensor or tuple of them) and `meta["amp_ir_location"]` (`location.Location`). A get_attr node
    is a constant tensor. A Python scalar of ATen (`alpha`, an exponent, ...) may be a node of a
    0-d float64 tensor where it depends on a hyper-parameter.
    `flatten_batch(args)` gives the batch tensors in the order of the BATCH inputs; it raises
    `errors.ArgumentError`, or `errors.ShapeMismatchError` when nothing but a shape differs.
    `unflatten_results(tensors)` builds what the user's step returns from the RESULT outputs.
    `notes` describe what the capture decided, one sentence each. `hooks` are called around a run;
    optimizer state that `hooks.install_state` puts in place is in `inputs` already.
    """

    graph: torch.fx.GraphModule = attrs.field(eq=False)
    inputs: tuple[CapturedInput, ...]
    outputs: tuple[CapturedOutput, ...]
    flatten_batch: Callable[..., list[torch.Tensor]] = attrs.field(eq=False)
    unflatten_results: Callable[[list[torch.Tensor]], Any] = attrs.field(eq=False)
    notes: tuple[str, ...] = ()
    hooks: StepHooks = attrs.field(factory=StepHooks, eq=False)
