# SPDX-License-Identifier: Apache-2.0
"""Reductions of no elements that have no value: PyTorch's kernels refuse them, its fakes do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

aten = torch.ops.aten

_OF_ALL = frozenset({aten.max.default, aten.min.default})
_OF_AN_AXIS = frozenset(
    {aten.max.dim, aten.min.dim, aten.median.dim, aten.nanmedian.dim, aten.mode.default}
)


def check_reduced(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise PyTorch's error where `func` takes the largest, middle or most common of nothing.

    Raises:
        RuntimeError: a tensor without elements is reduced as a whole.
        IndexError: the reduced axis has no elements.
    """
    if func not in _OF_ALL and func not in _OF_AN_AXIS:
        return
    x, name = args[0], func.overloadpacket.__name__
    if func in _OF_ALL:
        if x.numel() == 0:
            raise RuntimeError(
                f"{name}(): Expected reduction dim to be specified for input.numel() == 0. "
                "Specify the reduction dim with the 'dim' argument."
            )
        return
    axis = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    if x.ndim and x.shape[axis] == 0:
        raise IndexError(f"{name}(): Expected reduction dim {axis} to have non-zero size.")
