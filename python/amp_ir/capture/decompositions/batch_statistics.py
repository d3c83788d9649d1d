# SPDX-License-Identifier: Apache-2.0
"""`torch.batch_norm` and `torch.instance_norm` while a step is traced.

cuDNN's kernels are ops of their own, whose saved tensors only they can read: the functions here
never choose them. And a momentum may be a tensor: the weight of a batch in a cumulative average.
"""

from __future__ import annotations

from typing import Any

import torch

from amp_ir.capture.later_number import LaterNumber

# Patched during a capture, so that torch.nn.functional calls the functions here.
_batch_norm: Any = torch.batch_norm
_instance_norm: Any = torch.instance_norm


def batch_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,  # noqa: FBT001 - torch's own signature
    momentum: float | torch.Tensor | LaterNumber,
    eps: float,
    cudnn_enabled: bool,  # noqa: ARG001, FBT001
) -> torch.Tensor:
    """Replace `torch.batch_norm`; a momentum f64[] is 1 / n for the n-th batch.

    The n-th batch then has the same weight as each one before it.
    """
    averages = (running_mean, running_var)
    if isinstance(momentum, LaterNumber):  # SyncBatchNorm reads its count with .item()
        momentum = momentum.tensor
    if isinstance(momentum, torch.Tensor) and input.numel() == 0:
        momentum = 0.0  # PyTorch leaves the averages unchanged
    if not isinstance(momentum, torch.Tensor):
        y: torch.Tensor = _batch_norm(
            input, weight, bias, *averages, training, momentum, eps, False
        )
        return y
    # With a momentum of 1 these become the statistics of the batch.
    statistics = tuple(torch.zeros_like(one) for one in averages)  # type: ignore[arg-type]
    y = _batch_norm(input, weight, bias, *statistics, training, 1.0, eps, False)
    with torch.no_grad():
        for average, now in zip(averages, statistics, strict=True):
            assert average is not None
            average.copy_(average * (1 - momentum) + now * momentum)
    return y


def instance_norm(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Replace `torch.instance_norm`, whose last argument says whether to use cuDNN's kernel."""
    if "cudnn_enabled" in kwargs:
        y: torch.Tensor = _instance_norm(*args, **{**kwargs, "cudnn_enabled": False})
    else:
        y = _instance_norm(*args[:-1], False, **kwargs)
    return y
