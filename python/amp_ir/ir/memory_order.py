# SPDX-License-Identifier: Apache-2.0
"""The order of a dense tensor's dimensions in memory: of channels_last, or of a transpose.

An order has the dimensions from the outermost to the innermost; () is that of a contiguous tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the order in which a tensor is dense; None where elements overlap or have gaps."""
    if tensor.is_contiguous():
        return ()
    shape, strides = tensor.shape, tensor.stride()
    # A dimension of one element may have any stride, and may be anywhere.
    order = tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], -shape[d])))
    return order if tensor.permute(order).is_contiguous() else None


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """Return the order that undoes another one."""
    return tuple(order.index(d) for d in range(len(order)))


def extents_in_memory(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the extents of a tensor's dimensions as they are in memory."""
    return tuple(shape[d] for d in order) if order else tuple(shape)


def in_memory(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return the contiguous view of a tensor that is dense in an order."""
    return tensor.permute(*order) if order else tensor


def from_memory(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Return the tensor of which `in_memory` gives this one."""
    return tensor.permute(inverse(order)) if order else tensor


def strides_unless_contiguous(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return a tensor's strides; None for a contiguous one, whose strides may vary in vain."""
    return None if tensor.is_contiguous() else tensor.stride()


def strides_in_words(strides: tuple[int, ...] | None) -> str:
    """Return what `strides_unless_contiguous` found, as text."""
    return "contiguous" if strides is None else f"of strides {strides}"
