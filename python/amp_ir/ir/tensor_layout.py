# SPDX-License-Identifier: Apache-2.0
"""Storage of tensors in memory, on which kernels, the memory plan and exported files agree."""

from __future__ import annotations

import functools

import numpy as np

# Kernels load whole vectors: tensors begin at multiples of this. PyTorch's allocator gives such
# addresses; a slice of a tensor may not.
ALIGNMENT_BYTES = 64
# Kernels see these dtypes as integers of the same width (loops/codegen/kernel_buffers.py says why).
PHYSICAL_DTYPES = {"bfloat16": "uint16", "bool": "uint8"}


def physical_dtype(dtype: str) -> str:
    """Return the dtype under which kernels see elements of `dtype`."""
    return PHYSICAL_DTYPES.get(dtype, dtype)


@functools.cache
def dtype_nbytes(dtype: str) -> int:
    """Return the bytes of one stored element."""
    return np.dtype(physical_dtype(dtype)).itemsize
