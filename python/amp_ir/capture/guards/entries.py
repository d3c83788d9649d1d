# SPDX-License-Identifier: Apache-2.0
"""Guards on Python values that users keep beside tensors and in PyTorch's optimizers.

That is what their code may read of a parameter or buffer (`p.lr_mult`), of an optimizer
(`optimizer.scale`, `optimizer.defaults["lr"]`) and of its state (`optimizer.state[p]["k"]`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

from amp_ir.capture.guards.objects import Tier
from amp_ir.capture.guards.observer import Observer
from amp_ir.capture.guards.optimizer_objects import INTERNAL
from amp_ir.capture.guards.param_groups import Path, parts, path_in_words
from amp_ir.capture.guards.places import ABSENT, change_in_words, is_same
from amp_ir.capture.guards.watch import Dictionary, watch
from amp_ir.capture.state import State

Counts = Callable[[Any, Any], bool]


@attrs.frozen(eq=False)
class _Held:
    """A dictionary that may be there, and which of its entries count; `name` is for messages."""

    name: str
    find: Callable[[], Dictionary | None]
    counts: Counts
    is_fixed: bool = True

    def entries(self) -> dict[Path, Any]:
        """Return the values that count now, by their paths."""
        found = list((self.find() or {}).items())
        counted = [parts((key,), value) for key, value in found if self.counts(key, value)]
        return {path: value for part in counted for path, value in part}


class GuardedEntries:
    """What users' code may read beside tensors and in optimizers, as it is when this is made."""

    def __init__(self, state: State, observer: Observer) -> None:
        self._held = [*_of_tensors(state, observer), *_of_optimizers(state, observer)]
        self._movable = [held for held in self._held if not held.is_fixed]
        self._before = [held.entries() for held in self._held]
        # An item of a container can change without a new version of the dictionary.
        self._must_compare = any(len(path) > 1 for before in self._before for path in before)
        self._refresh()

    def tier(self) -> Tier:
        """Return these guards as a tier."""
        return Tier(self._hold, self._changes, self._refresh)

    def _refresh(self) -> None:
        self._found = [held.find() for held in self._movable]
        found = [held.find() for held in self._held]
        self._watched = watch([one for one in found if one is not None])

    def _hold(self) -> bool:
        now = (held.find() for held in self._movable)
        return (
            not self._must_compare
            and all(map(operator.is_, now, self._found))
            and self._watched.hold()
        )

    def _changes(self) -> Iterator[str]:
        for held, before in zip(self._held, self._before, strict=True):
            now = held.entries()
            for path in {**before, **now}:
                was, is_now = before.get(path, ABSENT), now.get(path, ABSENT)
                if not is_same(is_now, was):
                    yield f"{path_in_words(path)} of {held.name} {change_in_words(was, is_now)}"


def _of_tensors(state: State, observer: Observer) -> Iterator[_Held]:
    """Return the attributes of the tensors that the code names."""

    def counts(key: Any, _: Any) -> bool:
        return observer.users_code_names(frozenset({key}))

    for entry in (*state.parameters, *state.buffers, *state.outside):
        yield _Held(entry.name, functools.partial(_attributes, entry.tensor), counts)


def _of_optimizers(state: State, observer: Observer) -> Iterator[_Held]:
    """Return what the code names of PyTorch's optimizers, and their state that is no tensor."""

    def is_named(key: Any, _: Any) -> bool:
        return key not in INTERNAL and observer.users_code_names(frozenset({key}))

    names_defaults = observer.users_code_names(frozenset({"defaults"}))
    names_state = observer.users_code_names(frozenset({"state", "state_dict"}))
    for number, optimizer in enumerate(state.optimizers):
        is_torchs = type(optimizer).__module__.startswith("torch.optim")
        name = f"optimizer {number}"
        if is_torchs:
            yield _Held(name, functools.partial(_attributes, optimizer), is_named)
        if is_torchs and names_defaults:
            defaults = functools.partial(getattr, optimizer, "defaults")
            yield _Held(f"the defaults of {name}", defaults, lambda *_: True, is_fixed=False)
        if not is_torchs or names_state:
            yield from _of_state(state, optimizer, name)


def _of_state(state: State, optimizer: torch.optim.Optimizer, name: str) -> Iterator[_Held]:
    """Return what an optimizer's state holds but tensors of parameters, which are inputs."""

    def held(key: Any, of: str, counts: Counts) -> _Held:
        find = functools.partial(_state_of, optimizer, key)
        return _Held(f"the state of {of} in {name}", find, counts, is_fixed=False)

    for entry in state.parameters:
        yield held(entry.tensor, entry.name, _is_no_tensor)
    for key in optimizer.state:
        if not isinstance(key, torch.Tensor):
            yield held(key, repr(key), lambda *_: True)


def _attributes(of: object) -> Dictionary:
    return of.__dict__


def _state_of(optimizer: torch.optim.Optimizer, key: Any) -> Dictionary | None:
    found = optimizer.state.get(key)
    return found if isinstance(found, dict) else None


def _is_no_tensor(_: Any, value: Any) -> bool:
    return not isinstance(value, torch.Tensor)
