# SPDX-License-Identifier: Apache-2.0
"""Guards on the param groups of optimizers: what of them is frozen into a graph."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from amp_ir.capture.guards.places import ABSENT, CONTAINERS, change_in_words, is_same
from amp_ir.capture.guards.watch import watch
from amp_ir.capture.hyper_parameters import HyperParameter

# What PyTorch's schedulers store in the groups when they are made, also after the capture.
_OF_SCHEDULERS = frozenset(
    {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
)
_MOST_DEEP = 4

Group = dict[str, Any]
Path = tuple[Any, ...]


class GuardedGroups:
    """The groups, their parameters and what in them is no input, as they are when this is made.

    The options of an optimizer are guarded. With `users_read`, which says that other code than
    PyTorch's may read the groups, so are all other entries; tensors and objects by identity.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        hypers: Sequence[HyperParameter],
        *,
        users_read: bool,
    ) -> None:
        self._optimizers = optimizers
        self._hypers = hypers
        self._users_read = users_read
        self._groups = self._now()
        self._lists = [list(group["params"]) for _, group in self._groups]
        paths: dict[int, set[Path]] = {id(group): set() for _, group in self._groups}
        for hyper in hypers:
            path = (hyper.key,) if hyper.item is None else (hyper.key, hyper.item)
            paths[id(hyper.optimizer.param_groups[hyper.group])].add(path)
        self._inputs = [paths[id(group)] for _, group in self._groups]
        self._frozen = [self._frozen_of(k, *one) for k, one in enumerate(self._groups)]
        # A tensor or an item of a container can change without a new version of its group.
        self._must_compare = any(
            isinstance(value, (torch.Tensor, *CONTAINERS))
            for optimizer, group in self._groups
            for key, value in group.items()
            if self._counts(optimizer, key)
        )
        self.refresh()

    def refresh(self) -> None:
        """Record the groups as unchanged."""
        self._groups = self._now()
        self._watched = watch([group for _, group in self._groups])

    def hold(self) -> bool:
        """Return whether nothing differs now; may be False where nothing does."""
        return (
            not self._must_compare
            and self._are_the_same(self._now())
            and self._watched.hold()
            and all(map(self._has_list, range(len(self._groups))))
        )

    def changes(self) -> Iterator[str]:
        """Describe each difference."""
        now = self._now()
        if len(now) != len(self._groups):
            yield f"the optimizer had {len(self._groups)} param groups and has {len(now)}"
            return
        for number, (one, before) in enumerate(zip(now, self._frozen, strict=True)):
            group = one[1]
            if not self._has_list(number, group):
                yield f"param group {number} has other parameters"
            held = self._frozen_of(number, *one)
            for path in {**before, **held}:
                was, is_now = before.get(path, ABSENT), held.get(path, ABSENT)
                if not is_same(is_now, was):
                    words = change_in_words(was, is_now)
                    yield f"{path_in_words(path)} of param group {number} {words}"
        for hyper in self._hypers:
            if hyper.is_gone():
                yield f"{hyper.name} was removed"

    def _now(self) -> list[tuple[torch.optim.Optimizer, Group]]:
        return [(one, group) for one in self._optimizers for group in one.param_groups]

    def _are_the_same(self, now: list[tuple[torch.optim.Optimizer, Group]]) -> bool:
        groups = ([group for _, group in pairs] for pairs in (now, self._groups))
        return len(now) == len(self._groups) and all(map(operator.is_, *groups))

    def _has_list(self, number: int, group: Group | None = None) -> bool:
        """Return whether a group has the parameters of then, in their order."""
        now = (self._groups[number][1] if group is None else group)["params"]
        before = self._lists[number]
        return len(now) == len(before) and all(map(operator.is_, now, before))

    def _frozen_of(
        self, number: int, optimizer: torch.optim.Optimizer, group: Group
    ) -> dict[Path, Any]:
        """Return each plain value and object that is no input, by its path in the group."""
        keys = [key for key in group if self._counts(optimizer, key)]
        found = chain.from_iterable(parts((key,), group[key]) for key in keys)
        return {path: value for path, value in found if path not in self._inputs[number]}

    def _counts(self, optimizer: torch.optim.Optimizer, key: str) -> bool:
        if key in optimizer.defaults:
            return True
        return self._users_read and key != "params" and key not in _OF_SCHEDULERS


def parts(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """Return the values inside of nested containers, and the kind and size of each container."""
    if isinstance(value, set):
        yield path, frozenset(value)
    elif isinstance(value, (tuple, *CONTAINERS)) and len(path) < _MOST_DEEP:
        yield path, (type(value).__name__, len(value))
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from parts((*path, key), item)
    else:
        yield path, value


def path_in_words(path: Path) -> str:
    """Return a path as a message writes it: `k['by']`."""
    return str(path[0]) + "".join(f"[{key!r}]" for key in path[1:])
