# SPDX-License-Identifier: Apache-2.0
"""Whether two tensors have memory in common."""

from __future__ import annotations

import torch


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the bytes between first and last element meet."""
    first, second = memory_range(one), memory_range(other)
    return max(first.start, second.start) < min(first.stop, second.stop)


def memory_range(tensor: torch.Tensor) -> range:
    """Return the addresses from the first element of a strided tensor to the end of its last."""
    if not tensor.numel():
        return range(0)
    last = sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))
    # A fake tensor has a storage and no address in it.
    start = storage_address(tensor) + tensor.storage_offset() * tensor.element_size()
    return range(start, start + (last + 1) * tensor.element_size())


def storage_address(tensor: torch.Tensor) -> int:
    """Return where the storage of a tensor begins; a fake tensor's is at 0."""
    return tensor.untyped_storage().data_ptr()
