# SPDX-License-Identifier: Apache-2.0
"""Functions of PyTorch that use indices, decomposed so that an index out of range is detected.

PyTorch's own decompositions compare where its kernels look up, or add an offset of the plane first:
an index out of range would be a row of zeros, or an element of the next plane.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from amp_ir.capture.diagnostics import UnsupportedCall


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Return 1 at each class and 0 elsewhere, int64[...] -> int64[..., num_classes]."""
    if num_classes == -1:
        raise UnsupportedCall(
            "one_hot without num_classes has as many columns as the largest class says, and a "
            "compiled step has fixed shapes",
            "Pass num_classes=",
        )
    if num_classes <= 0 or tensor.dtype != torch.int64:
        return F.one_hot(tensor, num_classes)  # which reports the error
    classes = torch.arange(num_classes, device=tensor.device)
    known = classes.index_select(0, tensor.reshape(-1)).reshape(tensor.shape)
    return (known.unsqueeze(-1) == classes).long()


def _max_unpool(ndim_space: int) -> Callable[..., torch.Tensor]:
    def each(numbers: int | Sequence[int]) -> list[int]:
        several = [numbers] if isinstance(numbers, int) else list(numbers)
        return several * ndim_space if len(several) == 1 else several

    def max_unpool(
        input: torch.Tensor,
        indices: torch.Tensor,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        output_size: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Return zeros with elements of f32[*batch, *space] at the positions of a pooling."""
        kernel = each(kernel_size)
        strides = kernel if stride is None else each(stride)
        space = F._unpool_output_size(input, kernel, strides, each(padding), output_size)  # type: ignore[attr-defined]
        flat, places = input.flatten(-ndim_space), indices.flatten(-ndim_space)
        zeros = input.new_zeros(*flat.shape[:-1], math.prod(space))
        return zeros.scatter(-1, places, flat).unflatten(-1, tuple(space))

    return max_unpool


def _set_item(x: torch.Tensor, index: Any, value: Any) -> None:
    """Assign elements; a mask without axes chooses all or none, and PyTorch reads its value."""
    is_mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool and not index.ndim
    if not is_mask or (isinstance(value, torch.Tensor) and value.ndim > x.ndim):
        x[index] = value
        return
    chosen = value.to(x) if isinstance(value, torch.Tensor) else torch.full_like(x, value)
    x.copy_(torch.where(index, chosen, x))


COMPOSED_BY_INDEX: dict[Any, Callable[..., Any]] = {
    torch.Tensor.__setitem__: _set_item,
    F.one_hot: _one_hot,
    F.max_unpool1d: _max_unpool(1),
    F.max_unpool2d: _max_unpool(2),
    F.max_unpool3d: _max_unpool(3),
}
