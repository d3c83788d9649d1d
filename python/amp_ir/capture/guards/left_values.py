# SPDX-License-Identifier: Apache-2.0
"""Plain values that a step leaves in the user's objects, which the compiled step leaves too.

The first call may leave what later ones only read (`if self.size is None: self.size = len(x)`), and
each call what it does not read before (`self.size = len(x)`). A capture of another shape and the
user's own code then see what they would in PyTorch.
"""

from __future__ import annotations

import collections
import contextlib
import types
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensor

from amp_ir.capture.decompositions.packed_sequences import PackedPart
from amp_ir.capture.guards.gradient_flags import GradientFlags
from amp_ir.capture.guards.module_modes import ModuleModes
from amp_ir.capture.guards.places import ABSENT, Contents, Place, is_plain, is_same
from amp_ir.capture.guards.registered_modules import NewModule
from amp_ir.capture.later_number import LaterNumber
from amp_ir.capture.symbolic_float import Expression, SymbolicFloat, evaluate
from amp_ir.host.held_values import SEQUENCES, Again, each_held, held_by
from amp_ir.ir.location import Location

_MOST_DEEP = 4


@attrs.frozen(eq=False)
class Left:
    """A plain value that a step left in an object: where, what, and what a diagnostic says of it.

    `key` is equal for the same place in another trace.
    """

    place: Place | Contents | NewModule | ModuleModes
    value: Any
    key: tuple[int, Any]
    diagnostic: tuple[str, Location, str]


@attrs.frozen(eq=False)
class InitialValues:
    """The values that a step leaves in its first call.

    A value goes only where the object is as it was before the step: the user may have set another.
    `changes()` describes what differs of what that call read, from which the values come.
    """

    left: Sequence[Left] = ()
    changes: Callable[[], Iterator[str]] = lambda: iter(())

    @classmethod
    def of(cls, left: Sequence[Left], changes: Callable[[], Iterator[str]]) -> InitialValues | None:
        """Return values to be left; None where one may hold what belongs to the trace."""
        return cls(tuple(left), changes) if all(is_of_user(one.value) for one in left) else None

    def change(self) -> str:
        """Return why values that are missing, such as those that the user took, would be others."""
        return next(self.changes(), "") if self._missing() else ""

    def install(self) -> None:
        """Leave the values."""
        put_left(self._missing())

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the values in the user's objects for the duration of the context."""
        missing = self._missing()
        put_left(missing)
        try:
            yield
        finally:
            for one in _containers_first(missing):
                if not one.place.holds():
                    one.place.put_back()

    def _missing(self) -> list[Left]:
        return [one for one in self.left if one.place.holds()]


def put_left(left: Sequence[Left]) -> None:
    """Put values where they were left."""
    for one in _containers_first(left):
        if one.place.now() is not one.value:
            one.place.put(one.value)


def _containers_first(left: Sequence[Left]) -> list[Left]:
    """Return values with those of whole containers first, which have their entries in them."""
    return sorted(left, key=lambda one: not isinstance(one.place, Contents))


@attrs.frozen
class FollowedValue:
    """A number that is computed from inputs of the step, such as a learning rate."""

    expression: Expression
    is_integer: bool

    @classmethod
    def of(cls, value: Any) -> Any:
        """Return what a number of the trace stands for; any other value as it is."""
        if not isinstance(value, SymbolicFloat):
            return value
        return cls(value.expression, value.is_integer_valued)

    def value(self, inputs: list[float]) -> float:
        """Return the number for these inputs.

        Raises:
            LookupError: it depends on a tensor.
        """
        found = evaluate(self.expression, inputs)
        return int(found) if self.is_integer else found


@attrs.frozen(eq=False)
class StoredValue:
    """A value that each call of the step leaves in a place; a `FollowedValue` is computed then.

    `shared` are the ids of the user's containers, which the step has not made.
    """

    place: Place | ModuleModes | GradientFlags
    value: Any
    shared: frozenset[int] = frozenset()

    def install(self, inputs: Callable[[], list[float]]) -> None:
        """Leave the value; a container is a new one in each call, which the user may change."""
        value = renewed(
            self.value,
            self.shared,
            lambda one: one.value(inputs()) if isinstance(one, FollowedValue) else one,
        )
        if not is_same(self.place.now(), value):
            self.place.put(value)


def is_of_user(value: Any, known: Container[int] = ()) -> bool:
    """Return whether a value, and what it reaches, are no tensors and no numbers of a trace.

    `known` are the ids of modules that the step has not made; in a trace these have fake tensors.
    """

    def is_of_user_itself(one: Any) -> bool:
        if isinstance(one, torch.nn.Module):
            tensors = (*one.parameters(), *one.buffers())
            return id(one) in known or not any(isinstance(each, FakeTensor) for each in tensors)
        if isinstance(one, (FakeTensor, PackedPart, SymbolicFloat, LaterNumber)):
            return False
        return _is_end(one) or held_by(one) is not None

    try:
        return all(map(is_of_user_itself, each_held(value, _is_end)))
    except OverflowError:
        return False


def _is_end(value: Any) -> bool:
    """Return whether nothing is looked for in a value."""
    kinds = (
        type, types.ModuleType, torch.Tensor, torch.nn.Module, torch.optim.Optimizer,
        FollowedValue, SymbolicFloat, LaterNumber,
    )  # fmt: skip
    return value is ABSENT or is_plain(value) or isinstance(value, kinds)


def renewed(value: Any, shared: Container[int], changed: Callable[[Any], Any]) -> Any:
    """Return a value with new containers in place of those that the step makes in each call.

    What is in them, or the value itself, is what `changed` returns for it.
    """
    if id(value) in shared:
        return value
    if type(value) in (dict, collections.OrderedDict):
        return type(value)((key, renewed(one, shared, changed)) for key, one in value.items())
    if type(value) in (list, tuple, set):
        return type(value)(renewed(one, shared, changed) for one in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(renewed(one, shared, changed) for one in value))
    return changed(value)


def as_now(value: Any, shared: Container[int]) -> Any:
    """Return a value with the numbers of the trace as the step has them in this call."""

    def number(one: Any) -> Any:
        is_symbol = isinstance(one, SymbolicFloat)
        return FollowedValue.of(one).value(one.tape.inputs) if is_symbol else one

    return renewed(value, shared, number)


def holds_result_number(value: Any, shared: Container[int], depth: int = 0) -> bool:
    """Return whether a value holds a number that only the compiled step knows.

    In an object of the user's, that is also one that is an input: nothing computes it there.
    """
    if isinstance(value, SymbolicFloat):
        try:
            evaluate(value.expression, value.tape.inputs)
        except LookupError:
            return True
        return False
    if depth <= _MOST_DEEP and isinstance(value, (dict, *SEQUENCES, tuple, set)):
        inner = () if id(value) in shared else held_by(value) or ()
        return any(holds_result_number(one, shared, depth + 1) for one in inner)
    try:
        reached = each_held(value, lambda one: id(one) in shared or _is_end(one))
        return any(isinstance(one, (SymbolicFloat, LaterNumber)) for one in reached)
    except OverflowError:
        return False


def holds_symbol(value: Any, known: Container[int] = (), depth: int = 0) -> bool:
    """Return whether a value, or a container in it, holds a number that is an input.

    Containers of the ids `known` are left out: their entries are looked at alone.
    """
    if isinstance(value, SymbolicFloat) or depth > _MOST_DEEP or id(value) in known:
        return isinstance(value, SymbolicFloat)
    is_container = isinstance(value, (dict, *SEQUENCES, tuple, set, frozenset))
    return is_container and any(holds_symbol(one, known, depth + 1) for one in held_by(value) or ())


def in_full(value: Any) -> str:
    """Return a value of the user's as text, equal for equal values of two captures."""

    def text(one: Any) -> str:
        if one is ABSENT or is_plain(one) or isinstance(one, Again):
            return repr(one)
        return f"{type(one).__name__} of {len(held_by(one) or ())}"

    try:
        return ", ".join(map(text, each_held(value, _is_end)))
    except OverflowError:
        return type(value).__name__
