# SPDX-License-Identifier: Apache-2.0
"""The fakes of the state's tensors, where the user's objects hold these while a step is captured.

Modules and optimizers have the fakes then. `p is self.head` would be false where the user's own
references stayed those to the real ones; for sets and dictionaries see `identities`, too, which
hooks look up where no mode sees that the two are one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from amp_ir.capture.guards.identities import Identities
from amp_ir.capture.guards.places import CONTAINERS, Contents, flat

_MOST_ITEMS = 256
_MOST_DEEP = 4
_OF_EVERY_OPTIMIZER = frozenset({"param_groups", "state", "defaults"})


class StandIns:
    """What stands for the user's tensors while the step runs: the fakes of `identities`."""

    def __init__(self, identities: Identities) -> None:
        self._fakes = identities.fakes
        self._tensors = identities.tensors
        self._put: list[tuple[dict[str, Any], str, Any]] = []
        self._contents: list[Contents] = []
        self._arguments: list[tuple[functools.partial[Any], tuple[Any, ...]]] = []

    def begin(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Put fakes into what optimizers keep, which is not observed as other objects are."""
        known: set[int] = set()
        for optimizer in optimizers:
            self._put_into(optimizer, known)

    def _put_into(self, optimizer: torch.optim.Optimizer, known: set[int]) -> None:
        if id(optimizer) in known:
            return
        known.add(id(optimizer))
        self._put_values(vars(optimizer), _OF_EVERY_OPTIMIZER)
        for group in optimizer.param_groups:
            self._put_values(group, frozenset({"params"}))
        for value in vars(optimizer).values():
            if isinstance(value, torch.optim.Optimizer):
                self._put_into(value, known)

    def _put_values(self, own: dict[str, Any], ignored: frozenset[str]) -> None:
        for key in own.keys() - ignored:
            value = own[key]
            other = self.of(value)
            if other is not value:
                self._put.append((own, key, value))
                own[key] = other
            for container in _containers(value, 0):
                contents = Contents(container, str, flat(container))
                if contents.put_stand_ins(self.of):
                    self._contents.append(contents)

    def put_arguments(self, partial: functools.partial[Any]) -> None:
        """Put fakes among the arguments by position, which nothing else can store."""
        args = self.of(partial.args)
        if args is not partial.args:
            self._arguments.append((partial, partial.args))
            _give(partial, args)

    def end(self) -> None:
        """Put what optimizers keep back, and the arguments of partial functions."""
        for partial, args in self._arguments:
            _give(partial, args)
        self._arguments.clear()
        for contents in self._contents:
            contents.put_back()
        for own, key, value in self._put:
            own[key] = value
        self._contents.clear()
        self._put.clear()

    def of(self, value: Any) -> Any:
        """Return what stands for a value: that itself, but for the user's tensors."""
        if isinstance(value, torch.Tensor):
            return self._fakes.get(id(value), value)
        if isinstance(value, weakref.ref):
            return self._of_reference(value)
        if type(value) in (tuple, frozenset) and len(value) <= _MOST_ITEMS:
            items = [self.of(one) for one in value]
            if any(item is not one for item, one in zip(items, value, strict=True)):
                return type(value)(items)
        return value

    def tensor_of(self, fake: torch.Tensor) -> torch.Tensor | None:
        """Return the user's tensor that a fake stands for; None for what the step has made."""
        return self._tensors.get(id(fake))

    def _of_reference(self, reference: Any) -> Any:
        fake = self._fakes.get(id(reference()))
        if fake is None:
            return reference
        if isinstance(reference, weakref.KeyedRef):  # of a WeakValueDictionary
            return weakref.KeyedRef(fake, reference.__callback__, reference.key)
        return type(reference)(fake)


def _give(partial: functools.partial[Any], args: tuple[Any, ...]) -> None:
    state: Any = partial
    state.__setstate__((partial.func, args, partial.keywords, vars(partial)))


def _containers(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, CONTAINERS) and depth <= _MOST_DEEP:
        yield value
        for one in value.values() if isinstance(value, dict) else value:
            yield from _containers(one, depth + 1)
