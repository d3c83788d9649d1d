# SPDX-License-Identifier: Apache-2.0
"""How eager PyTorch is run beside ours: all in float64, and autocast that takes float32's masks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_WIDER = {
    **dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64),
    torch.complex64: torch.complex128,
}
_TENSOR: Any = torch.Tensor
_CASTS: dict[Any, Callable[..., Any]] = dict.fromkeys(
    (_TENSOR.float, _TENSOR.bfloat16, _TENSOR.half), _TENSOR.double
)
_FILLS = (torch.masked_fill, _TENSOR.masked_fill, _TENSOR.masked_fill_)


@contextlib.contextmanager
def in_double() -> Iterator[None]:
    """Run all in float64: what asks for a narrower dtype, or for none, too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wider():
            yield
    finally:
        torch.set_default_dtype(before)


class _Wider(TorchFunctionMode):
    """Replace each float dtype that is an argument."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(_wider, (args, kwargs or {}))
        return _CASTS.get(func, func)(*args, **kwargs)


def _wider(value: Any) -> Any:
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value


class FilledWithinRange(TorchFunctionMode):
    """Fill low tensors with their dtype's least number, where float32's is asked for.

    PyTorch refuses that one, which models take from a tensor that is float32 outside of autocast.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _FILLS and len(args) == 3 and isinstance(args[2], float):
            args = *args[:2], max(args[2], torch.finfo(args[0].dtype).min)
        return func(*args, **(kwargs or {}))
