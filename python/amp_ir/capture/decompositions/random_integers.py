# SPDX-License-Identifier: Apache-2.0
"""`Tensor.random_` as `torch.randint`: `from`, one of its overloads, is a keyword in a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten


def _random(x: torch.Tensor, *, generator: None = None) -> torch.Tensor:
    return _filled(x, 0, _end(x.dtype))


def _random_to(x: torch.Tensor, to: int, *, generator: None = None) -> torch.Tensor:
    return _filled(x, 0, to)


def _random_from(
    x: torch.Tensor, begin: int, to: int | None, *, generator: None = None
) -> torch.Tensor:
    return _filled(x, begin, _end(x.dtype) if to is None else to)


def _filled(x: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    drawn = torch.randint(begin, end, x.shape, dtype=torch.int64, device=x.device)
    return aten.copy_.default(x, drawn)


def _end(dtype: torch.dtype) -> int:
    """Return what lies above the largest integer, or the last one up to which floats have all."""
    if dtype is torch.bool:
        return 2
    if dtype.is_floating_point:
        return round(2 / torch.finfo(dtype).eps) + 1
    return int(torch.iinfo(dtype).max) + 1


RANDOM_INTEGERS: Mapping[Any, Callable[..., Any]] = {
    aten.random_.default: _random,
    aten.random_.to: _random_to,
    getattr(aten.random_, "from"): _random_from,
}
