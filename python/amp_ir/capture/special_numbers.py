# SPDX-License-Identifier: Apache-2.0
"""Numbers at which an op of PyTorch computes something else than beside them.

`addmm(x, a, b, beta=0)` does not read x, whose NaN would stay in 0 * x; `x ** 0.5` is a root, which
is NaN at -inf, where a power is inf; `lerp` has one form below 0.5 and one above it. Where such a
number is an input of the step, being special or not is a guard: a program for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from amp_ir.capture.symbolic_float import SymbolicFloat

_Choice = Callable[[SymbolicFloat], Any]


def guard_special_numbers(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with special numbers as constants; guard whether they are special."""
    options = _SPECIAL.get(func)
    if options is None:
        return args, kwargs
    for name, (place, choose) in options.items():
        if name in kwargs:
            kwargs = {**kwargs, name: _chosen(kwargs[name], choose)}
        elif place is not None and len(args) > place:
            args = (*args[:place], _chosen(args[place], choose), *args[place + 1 :])
    return args, kwargs


def _chosen(value: Any, choose: _Choice) -> Any:
    # What depends on a tensor (a count of updates) cannot be compared before the step runs.
    if not isinstance(value, SymbolicFloat) or not value.is_of_numbers:
        return value
    return choose(value)


def _constant_at(*special: float) -> _Choice:
    """Return a choice that replaces a number which is one of these by it."""
    return lambda value: next((one for one in special if value == one), value)


def _on_its_side(value: SymbolicFloat) -> SymbolicFloat:
    """Guard on which side of 0.5 a weight is."""
    _ = abs(value) < 0.5
    return value


def _methods(name: str) -> tuple[Any, ...]:
    """Return the function of a name, the method and the method that writes its tensor."""
    owners = ((torch, name), (torch.Tensor, name), (torch.Tensor, f"{name}_"))
    return tuple(getattr(owner, one) for owner, one in owners if hasattr(owner, one))


_FACTORS = {"beta": (None, _constant_at(0)), "alpha": (None, _constant_at(0))}
# Of a power of 0, the gradient of 0 is 0.
_EXPONENT = {"exponent": (1, _constant_at(0, 0.5, -0.5))}
_WEIGHT = {"weight": (2, _on_its_side)}
_POWERS = (*_methods("pow"), torch.Tensor.__pow__, torch.Tensor.__ipow__, *_methods("float_power"))

# Function -> option -> (its place among the positional arguments, if it has one; what to make).
_SPECIAL: Mapping[Any, Mapping[str, tuple[int | None, _Choice]]] = {
    **{
        function: _FACTORS
        for name in ("addmm", "addmv", "addr", "addbmm", "baddbmm")
        for function in _methods(name)
    },
    **dict.fromkeys(_POWERS, _EXPONENT),
    **dict.fromkeys(_methods("lerp"), _WEIGHT),
}
