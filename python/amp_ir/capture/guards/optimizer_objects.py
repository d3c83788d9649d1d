# SPDX-License-Identifier: Apache-2.0
"""The Python values that optimizers keep beside parameters' state and hyper-parameters.

A counter of an optimizer (`self.t += 1`, `group["step"] = group.get("step", 0) + 1`) decides what
its next step does, and a compiled step changes tensors only. So what a step leaves here is found as
what it leaves in the user's other objects, and what it may have read is guarded.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

from amp_ir.capture.guards.left_values import holds_symbol
from amp_ir.capture.guards.places import (
    ABSENT,
    CONTAINERS,
    Contents,
    Place,
    flat,
    in_words,
    is_plain,
    is_same,
)
from amp_ir.capture.hyper_parameters import IMPLEMENTATION_FLAGS

# What every optimizer has, and what schedulers of learning rates and captures put beside it.
INTERNAL = frozenset(vars(torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))]))) | {
    "_opt_called", "_step_count", "_step_supports_amp_scaling", "step",
}  # fmt: skip
_MOST_DEEP = 4


@attrs.frozen(eq=False)
class _Held:
    """A dictionary or another container, with what it held; `name` is how a message calls it.

    `keys` tells whether a key counts.
    """

    target: Any
    before: tuple[Any, ...]
    name: str
    is_part: Any

    def changes(self) -> Iterator[Place | Contents]:
        """Return what differs now from what was held."""
        if not isinstance(self.target, dict):
            if Contents(self.target, self._named, self.before).holds():
                return
            yield Contents(self.target, self._named, self.before)
            return
        old = dict(zip(self.before[::2], self.before[1::2], strict=True))
        now = {key: value for key, value in self.target.items() if self.is_part(key)}
        for key in {**old, **now}:
            before, after = old.get(key, ABSENT), now.get(key, ABSENT)
            if _counts(before) and _counts(after) and not is_same(after, before):
                name = functools.partial(str, f"{key!r} of {self.name}")
                yield Place(self.target, "entry", key, name, before)

    def _named(self) -> str:
        return self.name


class OptimizerObjects:
    """What some optimizers keep in Python objects, as it is when this is made.

    Of param groups only what is no hyper-parameter; without `groups`, nothing.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], *, groups: bool = True) -> None:
        self._groups = groups
        self._seen: set[int] = set()
        self._held = [
            held
            for k, one in enumerate(optimizers)
            for held in self._of(one, f"optimizer {k} ({type(one).__name__})", 0)
        ]

    @classmethod
    def of_users(cls, optimizers: Sequence[torch.optim.Optimizer]) -> OptimizerObjects:
        """Return what those keep that are not PyTorch's, which read no attributes of their own."""
        users = [one for one in optimizers if not type(one).__module__.startswith("torch.optim")]
        return cls(users, groups=False)

    def hold(self) -> bool:
        """Return whether nothing differs now."""
        return not self._held or not self.changes()

    def changes(self) -> list[Place | Contents]:
        """Return the places whose values differ now."""
        return [one for held in self._held for one in held.changes()]

    def changes_in_words(self) -> Iterator[str]:
        """Describe each difference."""
        for one in self.changes():
            if isinstance(one, Contents):
                yield f"{one.name()} has other items"
            else:
                yield f"{one.name()} was {in_words(one.before)} and is {in_words(one.now())}"

    def _of(self, optimizer: torch.optim.Optimizer, name: str, depth: int) -> Iterator[_Held]:
        yield from self._container(vars(optimizer), name, depth, _is_own)
        yield from self._container(optimizer.defaults, f"the defaults of {name}", depth)
        yield from self._container(optimizer.state, f"the state of {name}", depth, _is_no_tensor)
        for k, group in enumerate(optimizer.param_groups if self._groups else ()):
            followed = {key for key, value in group.items() if holds_symbol(value)}
            followed |= {"params", *IMPLEMENTATION_FLAGS}
            is_part = functools.partial(_is_other, followed)
            yield from self._container(group, f"param group {k} of {name}", depth, is_part)

    def _container(
        self, target: Any, name: str, depth: int, is_part: Any = lambda _: True
    ) -> Iterator[_Held]:
        if id(target) in self._seen or depth > _MOST_DEEP:
            return
        self._seen.add(id(target))
        if isinstance(target, dict):
            items = {key: value for key, value in target.items() if is_part(key)}
            inner = list(items.items())
            before = tuple(part for pair in items.items() for part in pair)
        else:
            before = flat(target)
            inner = list(enumerate(before))
        yield _Held(target, before, name, is_part)
        for key, value in inner:
            if isinstance(value, torch.optim.Optimizer) and id(value) not in self._seen:
                self._seen.add(id(value))
                yield from self._of(value, f"{key!r} of {name}", depth + 1)
            elif isinstance(value, CONTAINERS) and not is_plain(value):
                yield from self._container(value, f"{key!r} of {name}", depth + 1)


def _counts(value: Any) -> bool:
    """Return whether a value is data: functions are put there by captures and schedulers, too."""
    return value is ABSENT or is_plain(value) or isinstance(value, (*CONTAINERS, torch.Tensor))


def _is_own(key: Any) -> bool:
    return key not in INTERNAL


def _is_no_tensor(key: Any) -> bool:
    return not isinstance(key, torch.Tensor)


def _is_other(followed: set[str], key: Any) -> bool:
    return key not in followed
