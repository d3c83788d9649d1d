# SPDX-License-Identifier: Apache-2.0
"""Calls whose result depends in PyTorch on the order of their input in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

# Rows and columns up to which PyTorch resizes planes by the kernel for channels last whatever their
# order is, and channels from which on there is such a kernel (2.11 to 2.13, UpSampleKernel.cpp).
_SMALL_PLANE = 128
_CHANNELS = 4
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def refused_layout(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, str] | None:
    """Return what is refused of a call for its input's order in memory, and what to do; or None.

    The kernel for channels last takes no notice of a scale by which the extent stays or doubles,
    3 * 1.3 and 4 * 2.2. The order in memory is not known where the call is compiled.
    """
    if func._schema.name not in ("aten::upsample_nearest2d", "aten::upsample_nearest3d"):
        return None
    x, size, *scales = [*args, *kwargs.values()]
    if len(scales) == 1 and isinstance(scales[0], (list, tuple)):
        (scales,) = scales
    if not _is_in_channels_last(x) or not any(one is not None for one in scales):
        return None
    extents = x.shape[2:]
    sizes = size or [int(n * scale) for n, scale in zip(extents, scales, strict=True)]
    if len(extents) == 2 and sum(sizes) <= _SMALL_PLANE:
        return None
    for extent, out, scale in zip(extents, sizes, scales, strict=True):
        if (out == extent and scale != 1) or (out == 2 * extent and scale != 2):
            return (
                f"F.interpolate to the nearest element of {extent} by {scale:g}, to {out}, reads "
                "other elements in PyTorch where its input has its channels last in memory",
                f"Pass size= instead of scale_factor=, or make the input contiguous: "
                f"F.interpolate(x.contiguous(), scale_factor={scale:g})",
            )
    return None


def _is_in_channels_last(x: torch.Tensor) -> bool:
    is_last = x.is_contiguous(memory_format=_FORMATS[x.dim()]) and not x.is_contiguous()
    return is_last and x.shape[1] >= _CHANNELS
