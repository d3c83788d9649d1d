# SPDX-License-Identifier: Apache-2.0
"""Annotations of the user's functions: the precision of what is captured inside of them.

The names are apex's. They change nothing in plain PyTorch, and nothing outside of a capture.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import ModuleType
from typing import ParamSpec, TypeVar

import attrs

from amp_ir.errors import OptionError
from amp_ir.ir.location import Precision, precision_of_region

P = ParamSpec("P")
R = TypeVar("R")


def half_function(function: Callable[P, R]) -> Callable[P, R]:
    """Run every op inside of a function, and of its backward pass, in the step's low dtype.

    The gradients of parameters leave in float32 still. In plain PyTorch nothing changes. Of nested
    annotations and regions of `torch.autocast` the innermost decides; an `Override` comes after
    them.

    Raises:
        OptionError: it is no function.
    """
    return _annotated(_checked(function, "half_function"), "low")


def float_function(function: Callable[P, R]) -> Callable[P, R]:
    """Run every op inside of a function, and of its backward pass, in float32.

    Otherwise as `half_function`.
    """
    return _annotated(_checked(function, "float_function"), "float32")


def promote_function(function: Callable[P, R]) -> Callable[P, R]:
    """Run every op inside of a function, and of its backward pass, in the widest dtype it reads.

    An op runs low if all that it reads is stored low, and in float32 if any of it is not. Otherwise
    as `half_function`.
    """
    return _annotated(_checked(function, "promote_function"), "promote")


def register_half_function(module: object, name: str) -> None:
    """Let captures treat `module.name` as `half_function` does.

    The function is replaced for the time of a capture only, and where it is looked up in `module`:
    `from module import name` made a reference of its own. A step that is captured already is
    captured again at its next call. The last registration of a function counts.

    Raises:
        OptionError: `module` has no function of that name.
    """
    _register(module, name, "low")


def register_float_function(module: object, name: str) -> None:
    """Let captures treat `module.name` as `float_function` does; see `register_half_function`.

    Raises:
        OptionError: `module` has no function of that name.
    """
    _register(module, name, "float32")


def register_promote_function(module: object, name: str) -> None:
    """Let captures treat `module.name` as `promote_function` does; see `register_half_function`.

    Raises:
        OptionError: `module` has no function of that name.
    """
    _register(module, name, "promote")


def _checked(function: Callable[P, R], name: str) -> Callable[P, R]:
    if not callable(function):
        raise OptionError(
            f"{name} takes a function and got a {type(function).__name__}; write @amp_ir.{name} "
            "above the function's definition"
        )
    return function


def _annotated(function: Callable[P, R], precision: Precision) -> Callable[P, R]:
    @functools.wraps(function)
    def annotated(*args: P.args, **kwargs: P.kwargs) -> R:
        with precision_of_region(precision):
            return function(*args, **kwargs)

    return annotated


@attrs.frozen(eq=False)
class Registration:
    """A function that captures annotate: `owner.name`."""

    owner: object
    name: str
    precision: Precision

    def __str__(self) -> str:
        return f"{_name_of(self.owner)}.{self.name} ({self.precision})"

    def annotated(self, function: Callable[..., object]) -> Callable[..., object]:
        """Return the function as a capture calls it."""
        return _annotated(function, self.precision)


_registered: dict[tuple[int, str], Registration] = {}
# What is registered, in words: made under the lock, for each call of a step reads it.
_described = "none"
_lock = threading.Lock()


def registrations() -> tuple[Registration, ...]:
    """Return what has been registered so far."""
    return tuple(_registered.values())


def described_registrations() -> str:
    """Return the registered functions and their precisions in words."""
    return _described


def _register(owner: object, name: str, precision: Precision) -> None:
    if not (isinstance(name, str) and callable(getattr(owner, name, None))):
        raise OptionError(
            f"{_name_of(owner)} has no function {name!r}; pass the module, or the class, that the "
            'function is looked up in, as in register_half_function(torch.nn.functional, "linear")'
        )
    global _described
    with _lock:
        _registered[id(owner), name] = Registration(owner, name, precision)
        _described = ", ".join(str(one) for one in _registered.values())


def _name_of(owner: object) -> str:
    return owner.__name__ if isinstance(owner, (ModuleType, type)) else repr(owner)
