# SPDX-License-Identifier: Apache-2.0
"""Zeros of forward mode, which PyTorch represents without memory.

0 times an infinity is 0 for them. Where tensors are fake, PyTorch's own lose their device under
vmap: the step has real zeros, and their products and quotients are zeros, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten

_MAKES = aten._efficientzerotensor.default
_PRODUCTS = frozenset({aten.mul.Tensor, aten.dot.default, aten.vdot.default})
_SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor})


class ZeroTangents:
    """The zeros that forward mode made, and what is computed of them."""

    def __init__(self) -> None:
        self._zeros: Any = WeakIdKeyDictionary()

    def call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an op of such zeros; None where it is any other op."""
        if func is _MAKES:
            return self._made(aten.zeros.default(*args, **kwargs))
        if not self._zeros:
            return None
        if func._schema.is_mutable and any(self._has(one) for one in args):
            # PyTorch's own zeros cannot be written; of these, views may share the memory.
            self._zeros.clear()
            return None
        if self._is_zero(func, args):
            shape = func(*args, **kwargs)
            return self._made(torch.zeros_like(shape))
        if func.is_view and self._has(args[0]):
            return self._made(func(*args, **kwargs))
        return None

    def _made(self, zeros: Any) -> Any:
        self._zeros[zeros] = None
        return zeros

    def _has(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value in self._zeros

    def _is_zero(self, func: Any, args: tuple[Any, ...]) -> bool:
        are_zeros = [self._has(one) for one in args[:2]]
        if func in _PRODUCTS:
            return any(are_zeros)
        if func in _SUMS:
            return all(are_zeros)
        return func is aten.div.Tensor and are_zeros == [True, False]
