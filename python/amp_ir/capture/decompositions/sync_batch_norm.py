# SPDX-License-Identifier: Apache-2.0
"""SyncBatchNorm as sums over the ranks, which autograd differentiates.

PyTorch's own function is of GPUs, and calls collectives that a trace does not see. Mean and
variance are of the elements of all ranks together, whose batches may have other sizes; the gradient
of a mean over the ranks is the mean of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from amp_ir.capture.collectives import TracedRanks
from amp_ir.ir.location import precision_of_region

MeanOf = Callable[[torch.Tensor], torch.Tensor]


class _MeanOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, mean: MeanOf) -> torch.Tensor:
        context.mean = mean
        return mean(x)

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> Any:
        return context.mean(grad), None


def synced_forward(ranks: TracedRanks, own: Callable[..., torch.Tensor]) -> Any:
    """Return the forward of SyncBatchNorm; `own` is PyTorch's, for evaluation."""

    def forward(module: torch.nn.SyncBatchNorm, x: torch.Tensor) -> torch.Tensor:
        found = ranks.mean_for(module) if module.training else None
        if found is None:
            return own(module, x)
        module._check_input_dim(x)
        # Differences of nearly equal numbers, as in BatchNorm's own kernel: not to be rounded.
        with precision_of_region("off"):
            return _normalized(module, x, *found)

    return forward


def _normalized(
    module: torch.nn.SyncBatchNorm, x: torch.Tensor, mean_of: MeanOf, ranks: int
) -> torch.Tensor:
    axes = [axis for axis in range(x.dim()) if axis != 1]
    shape = [-1 if axis == 1 else 1 for axis in range(x.dim())]
    total = x.sum(axes)
    count = total.new_full((1,), x.numel() // x.shape[1])
    # Sums by rank, and how many elements they are of.
    sums = _MeanOverRanks.apply(torch.cat([total, count]), mean_of)
    elements = sums[-1].detach()
    mean = sums[:-1] / elements
    centered = x - mean.view(shape)
    squares = _MeanOverRanks.apply(centered.square().sum(axes), mean_of)
    variance = squares / elements
    if module.track_running_stats:
        _update_statistics(module, mean.detach(), squares.detach(), elements, ranks)
    y = centered * torch.rsqrt(variance + module.eps).view(shape)
    if module.weight is not None:
        y = y * module.weight.view(shape) + module.bias.view(shape)
    return y


def _update_statistics(
    module: torch.nn.SyncBatchNorm,
    mean: torch.Tensor,
    squares: torch.Tensor,
    elements: torch.Tensor,
    ranks: int,
) -> None:
    assert module.num_batches_tracked is not None
    assert module.running_mean is not None and module.running_var is not None
    with torch.no_grad():
        module.num_batches_tracked.add_(1)
        share: Any = module.momentum
        if share is None:
            share = 1.0 / module.num_batches_tracked.to(mean.dtype)
        unbiased = squares * ranks / (elements * ranks - 1)
        for running, now in ((module.running_mean, mean), (module.running_var, unbiased)):
            running.copy_(running * (1 - share) + now * share)
