# SPDX-License-Identifier: Apache-2.0
"""AWS RAF's names: a step from a model and a loss, and what the step costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from amp_ir.amp.custom_type_hint import CustomTypeHint
from amp_ir.api import autocast, trace_step
from amp_ir.host.kept_random import kept_random
from amp_ir.ir.step_module import StepModule

with kept_random():  # their reports need Rich
    from amp_ir.api.measure import (
        get_gflops,
        get_param_size,
        get_peak_memory,
        profile_vm_model,
        trace_memory,
    )

__all__ = [
    "CustomTypeHint",
    "append_loss_n_optimizer",
    "autocast",
    "calc_model_gflops",
    "get_param_size",
    "get_peak_memory",
    "profile_vm_model",
    "trace_memory",
]

calc_model_gflops = get_gflops


def append_loss_n_optimizer(
    model: torch.nn.Module,
    args: Sequence[torch.Tensor],
    out_shape: Sequence[int],
    y_true: torch.Tensor,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
) -> StepModule:
    """Capture the training step of a model: cross entropy, backward pass and SGD(0.1, 0.01).

    Args:
        model: the network; of an output with `logits`, these count.
        args: the inputs of the model.
        out_shape: f[..., classes], the shape of its output.
        y_true: f32[rows, classes], one-hot.
        optimizer: makes the optimizer of the parameters.

    Returns:
        The step; its example batch is `(*args, y_true)`. RAF's `dy` is not an input of it.
    """
    made = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.01))
    of_model = made(model.parameters())

    def step(*batch: Any) -> torch.Tensor:
        *inputs, target = batch
        output = model(*inputs)
        scores = getattr(output, "logits", output).reshape(-1, out_shape[-1])
        loss = -(torch.log_softmax(scores, -1) * target).sum(-1).mean()
        loss.backward()
        of_model.step()
        of_model.zero_grad()
        return loss.detach()

    mod, _ = trace_step(step, (*args, y_true), model=model, optimizer=of_model)
    return mod
