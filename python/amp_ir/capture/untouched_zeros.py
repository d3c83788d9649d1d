# SPDX-License-Identifier: Apache-2.0
"""Zeros for a new optimizer's state whose memory is touched by the first step, not by a capture.

`torch.zeros_like` writes every page at once: for two moments of GPT-2 with two layers a fifth of
the time of a capture, and as much memory, which an analysis of the step never needs. The system
hands out zeroed pages when they are first used, in large ones where it can.
"""

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Fewer bytes are not worth a mapping of their own.
_LEAST_NBYTES = 1 << 20
# Windows has no private mappings without a file.
_is_possible = hasattr(mmap, "MAP_PRIVATE") and hasattr(mmap, "MAP_ANONYMOUS")


class UntouchedZeros(TorchFunctionMode):
    """Make the zeros of `torch.zeros_like` in untouched memory, where they are large."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the function, or make its zeros."""
        named = dict(kwargs or {})
        if func is torch.zeros_like and len(args) == 1 and set(named) <= {"memory_format"}:
            (like,) = args
            if _is_large(like):
                with torch._C.DisableTorchFunction():
                    return untouched_zeros_like(like, **named)
        return func(*args, **named)


def untouched_zeros_like(
    like: torch.Tensor, *, memory_format: torch.memory_format = torch.preserve_format
) -> torch.Tensor:
    """Return zeros of a CPU tensor's shape, dtype and layout, in memory of whole pages."""
    kind = torch.empty_like(like, device="meta", memory_format=memory_format)
    memory = mmap.mmap(-1, kind.untyped_storage().nbytes(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(memory, dtype=like.dtype)
    return torch.empty(0, dtype=like.dtype).set_(
        flat.untyped_storage(), 0, kind.shape, kind.stride()
    )


def _is_large(like: Any) -> bool:
    return (
        _is_possible
        and type(like) in (torch.Tensor, torch.nn.Parameter)
        and like.device.type == "cpu"
        and like.layout is torch.strided
        and like.numel() * like.element_size() >= _LEAST_NBYTES
    )
