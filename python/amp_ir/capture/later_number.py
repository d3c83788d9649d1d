# SPDX-License-Identifier: Apache-2.0
"""The result of `.item()` in a step: a number that does not exist yet when the step is captured.

It is a 0-d tensor of float64, int64 or bool, with the operators of a number. A step may return it
(the compiled step reads it after its run), compute with it, multiply tensors by it and compare it.
What needs the value itself (a size, `print`, `float()`) reads the tensor or makes text of it, which
is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
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


def _power(*, swapped: bool = False) -> Any:
    """Return the method of a power; of two integers it may be a fraction, which is not followed."""
    as_floats = _arithmetic(operator.pow, swapped=swapped, is_exact=False)

    def method(self: LaterNumber, other: Any) -> Any:
        is_tensor = isinstance(other, torch.Tensor)
        is_float = is_tensor or any(map(_is_float, (self.tensor, _operand(other))))
        return as_floats(self, other) if is_float else NotImplemented

    return method


def _comparison(operation: _Operation) -> Any:
    def method(self: LaterNumber, other: Any) -> Any:
        operand = _operand(other)
        return NotImplemented if operand is None else operation(self.tensor, operand)

    return method


_TESTS = {"isfinite": torch.isfinite, "isnan": torch.isnan, "isinf": torch.isinf}
_MATH: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **_TESTS, "exp": torch.exp, "log": torch.log, "log2": torch.log2, "log10": torch.log10,
    "sqrt": torch.sqrt, "sin": torch.sin, "cos": torch.cos, "tanh": torch.tanh, "fabs": torch.abs,
}  # fmt: skip


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

    __pow__, __rpow__ = _power(), _power(swapped=True)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of PyTorch's that takes a number, which PyTorch asks here."""
        return call_with_numbers(func, args, kwargs or {})

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


def call_with_numbers(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of PyTorch's with the tensors of its numbers."""
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    beside = next((one for one in leaves if isinstance(one, torch.Tensor)), None)

    def tensor_of(number: LaterNumber) -> torch.Tensor:
        if beside is None:
            return number.tensor
        return number.tensor.to(_dtype_beside(number.tensor, beside))

    args, named = pytree.tree_map_only(LaterNumber, tensor_of, (args, dict(kwargs)))
    name = getattr(func, "__name__", "")
    kind = name.rstrip("_")
    if kind in ("full", "full_like") and isinstance(args[-1], torch.Tensor):
        zero = 0.0 if args[-1].is_floating_point() else 0
        return func(*args[:-1], zero, **named).fill_(args[-1])
    # No tensor may be one of these.
    if kind in ("add", "sub") and isinstance(named.get("alpha"), torch.Tensor):
        return func(*args[:-1], args[-1] * named.pop("alpha"), **named)
    if kind in ("addcmul", "addcdiv") and isinstance(named.get("value"), torch.Tensor):
        return func(*args[:-2], args[-2] * named.pop("value"), args[-1], **named)
    return func(*args, **named)


def math_of_numbers(name: str, values: tuple[Any, ...]) -> Any:
    """Return what a function of `math` computes of numbers; NotImplemented for other functions."""
    function = _MATH.get(name)
    if function is None or len(values) != 1:
        return NotImplemented
    x = values[0].tensor.to(torch.float64)
    found = function(x)
    if name in _TESTS:
        return found
    # Python raises where PyTorch computes an infinity or NaN.
    is_right = torch.isfinite(found) | ~torch.isfinite(x)
    torch._assert_async(is_right, f"math.{name}: math domain or range error")
    return LaterNumber(found)


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
