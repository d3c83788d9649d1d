# SPDX-License-Identifier: Apache-2.0
"""The result of `.item()` in a step: a number that does not exist yet when the step is captured.

It is a 0-d tensor of float64, int64 or bool, with the operators of a number. A step may return it
(the compiled step reads it after its run), compute with it, multiply tensors by it and compare it.
What needs the value itself (a size, `print`, `float()`) reads the tensor or makes text of it, which
is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from amp_ir.capture.constant_values import constant_value
from amp_ir.capture.patches.restores import Restores
from amp_ir.capture.patches.thread_patches import patch_function

_Operation = Callable[[Any, Any], Any]


def patch_item(restores: Restores) -> None:
    """Let `.item()` of a traced tensor return a LaterNumber."""
    original: Any = torch.Tensor.item

    def item(tensor: torch.Tensor) -> Any:
        is_value = isinstance(tensor, FakeTensor) and tensor.constant is None
        if not is_value or tensor.numel() != 1 or tensor.is_complex():
            return original(tensor)
        constant = constant_value(tensor)
        return LaterNumber.of(tensor) if constant is None else constant.item()

    patch_function(restores, torch.Tensor, "item", item)


def _arithmetic(operation: _Operation, *, swapped: bool = False, is_exact: bool = True) -> Any:
    """Return an operator's method; integers stay integers where `is_exact`."""

    def method(self: LaterNumber, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            mine = self.tensor.to(_dtype_beside(self.tensor, other))
            return operation(other, mine) if swapped else operation(mine, other)
        operands = [self.tensor, _operand(other)]
        if operands[1] is None:
            return NotImplemented
        if not is_exact or any(map(_is_float, operands)):
            operands = [_as(one, torch.float64) for one in operands]
        else:
            operands = [_as(one, torch.int64) for one in operands]
        return LaterNumber(operation(*reversed(operands)) if swapped else operation(*operands))

    return method


def _comparison(operation: _Operation) -> Any:
    def method(self: LaterNumber, other: Any) -> Any:
        operand = _operand(other)
        return NotImplemented if operand is None else operation(self.tensor, operand)

    return method


class LaterNumber:
    """A number that the compiled step computes."""

    __slots__ = ("tensor",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> LaterNumber:
        """Return the number in a tensor of one element."""
        exact = torch.float64 if tensor.is_floating_point() else torch.int64
        dtype = torch.bool if tensor.dtype is torch.bool else exact
        return cls(tensor.detach().reshape(()).to(dtype, copy=True))

    __add__, __radd__ = _arithmetic(operator.add), _arithmetic(operator.add, swapped=True)
    __sub__, __rsub__ = _arithmetic(operator.sub), _arithmetic(operator.sub, swapped=True)
    __mul__, __rmul__ = _arithmetic(operator.mul), _arithmetic(operator.mul, swapped=True)
    __truediv__ = _arithmetic(operator.truediv, is_exact=False)
    __rtruediv__ = _arithmetic(operator.truediv, swapped=True, is_exact=False)
    __floordiv__ = _arithmetic(operator.floordiv)
    __rfloordiv__ = _arithmetic(operator.floordiv, swapped=True)
    __mod__, __rmod__ = _arithmetic(operator.mod), _arithmetic(operator.mod, swapped=True)
    __eq__, __ne__ = _comparison(operator.eq), _comparison(operator.ne)
    __lt__, __le__ = _comparison(operator.lt), _comparison(operator.le)
    __gt__, __ge__ = _comparison(operator.gt), _comparison(operator.ge)

    def __neg__(self) -> LaterNumber:
        """Return the number with the other sign."""
        return LaterNumber(-self._number())

    def __abs__(self) -> LaterNumber:
        """Return the number without its sign."""
        return LaterNumber(self._number().abs())

    def __bool__(self) -> bool:
        """Read whether the number is not zero."""
        return bool(self.tensor if self.tensor.dtype is torch.bool else self.tensor != 0)

    def __float__(self) -> float:
        """Read the number."""
        return float(self.tensor)

    def __int__(self) -> int:
        """Read the number."""
        return int(self.tensor)

    def __index__(self) -> int:
        """Read the number, for a size or a place."""
        return int(self.tensor)

    def __round__(self, digits: int | None = None) -> Any:
        """Read the number."""
        return round(float(self.tensor), digits)

    def __repr__(self) -> str:
        """Make text of the number."""
        return self.__format__("")

    def __format__(self, spec: str) -> str:
        """Make text of the number, which is refused as for a tensor with a specification."""
        return format(self.tensor, spec or "g")

    def _number(self) -> torch.Tensor:
        return self.tensor.to(torch.int64) if self.tensor.dtype is torch.bool else self.tensor


def _operand(value: Any) -> Any:
    """Return the tensor or Python number of an operand; None for anything else."""
    if isinstance(value, LaterNumber):
        return value.tensor
    return value if isinstance(value, (bool, int, float, torch.Tensor)) else None


def _is_float(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, torch.Tensor) else type(value) is float


def _as(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) else value


def _dtype_beside(number: torch.Tensor, tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of a number that leaves an operation's dtype as a Python number would."""
    if tensor.is_complex():
        return tensor.dtype.to_real()
    if tensor.is_floating_point():
        return tensor.dtype
    return torch.get_default_dtype() if number.is_floating_point() else number.dtype
