# SPDX-License-Identifier: Apache-2.0
"""Large tensors of a CPU in huge pages: a fault for 2 MiB of new memory, not for each 4 KiB.

The system clears a page when it is first touched. The logits of a BERT with 8 x 128 tokens are
125 MB of new memory in every call: 30 thousand faults of 4 KiB.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import torch

# glibc gives blocks above its largest threshold a mapping of their own (mallopt(3),
# M_MMAP_THRESHOLD): the advice ends with the block, and no other block shares its pages.
_LEAST_NBYTES = 32 << 20


def empty_in_huge_pages(
    shape: Sequence[int] | int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return `torch.empty` of this shape; of a large one on a CPU, asks for huge pages.

    Raises:
        RuntimeError: as PyTorch raises it where memory ends.
    """
    made = torch.empty(shape, dtype=dtype, device=device)
    nbytes = made.numel() * made.element_size()
    if made.device.type == "cpu" and nbytes > _LEAST_NBYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        start = -made.data_ptr() % mmap.PAGESIZE
        # It is advice: a system without huge pages declines it, and nothing else changes.
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(made.data_ptr() + start),
            ctypes.c_size_t((nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE),
            mmap.MADV_HUGEPAGE,
        )
    return made
