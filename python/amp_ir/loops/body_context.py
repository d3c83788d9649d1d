# SPDX-License-Identifier: Apache-2.0
"""The context in which bodies of loop values run: what `value[index]` and `let` do there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any


@contextlib.contextmanager
def assigned(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Set a variable inside the block, for this thread alone: steps may be lowered side by side."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


# Takes a value and an index.
Access = Callable[[Any, tuple[Any, ...]], Any]
_access: ContextVar[Access | None] = ContextVar("access", default=None)


def current_access() -> Access:
    """Return the function that evaluates `value[index]` now."""
    access = _access.get()
    assert access is not None, "an element is read outside of the body of a loop value"
    return access


def reading(access: Access) -> AbstractContextManager[None]:
    """Evaluate `value[index]` as `access(value, index)` inside the block."""
    return assigned(_access, access)


Let = Callable[[Any], Any]
_let: ContextVar[Let | None] = ContextVar("let", default=None)
_scalar_loop: ContextVar[Callable[[], None] | None] = ContextVar("scalar_loop", default=None)


def let(element: Any) -> Any:
    """Name an element expression in the kernel being written, so that it is computed once."""
    name = _let.get()
    return element if name is None else name(element)


@contextlib.contextmanager
def let_as(let_element: Let, needs_scalar_loop: Callable[[], None]) -> Iterator[None]:
    """Make `let(x)` call `let_element(x)`, and `scalar_loop` the other, inside the block."""
    with assigned(_let, let_element), assigned(_scalar_loop, needs_scalar_loop):
        yield


def scalar_loop() -> None:
    """Declare that the element being written uses a function that cannot be vectorised.

    TVM's vectoriser splits such a statement lane by lane and loses the names bound before it.
    """
    declare = _scalar_loop.get()
    if declare is not None:
        declare()
