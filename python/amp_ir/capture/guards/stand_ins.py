# SPDX-License-Identifier: Apache-2.0
"""The fakes of parameters and buffers, where the user's objects hold these, or their ids.

While a step is captured, modules and optimizers have fake tensors. Where the user's own references
stayed those to the real ones, `p is self.head`, `p in self.frozen`, `id(p) in self.ids` and
`self.scales[p]` would be other than they are in PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from amp_ir.capture.guards.places import CONTAINERS, Contents, flat

_MOST_ITEMS = 256
_MOST_DEEP = 4
_OF_EVERY_OPTIMIZER = frozenset({"param_groups", "state", "defaults"})


class StandIns:
    """What stands for the user's tensors, and for their ids, while the step runs."""

    def __init__(self) -> None:
        self._fakes: Mapping[int, torch.Tensor] = {}
        self._ids: dict[int, int] = {}
        self._put: list[tuple[dict[str, Any], str, Any]] = []
        self._contents: list[Contents] = []

    def begin(
        self,
        fakes: Mapping[int, torch.Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        """Take the fakes by the ids of the user's tensors, and put them into what optimizers keep.

        The objects that optimizers keep are not observed as others are.
        """
        self._fakes = fakes
        self._ids = {key: id(fake) for key, fake in fakes.items()}
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

    def end(self) -> None:
        """Put what optimizers keep back."""
        for contents in self._contents:
            contents.put_back()
        for own, key, value in self._put:
            own[key] = value
        self._contents.clear()
        self._put.clear()

    def of(self, value: Any) -> Any:
        """Return what stands for a value: that itself, but for the user's tensors and their ids."""
        if isinstance(value, torch.Tensor):
            return self._fakes.get(id(value), value)
        if type(value) is int:
            return self._ids.get(value, value)
        if type(value) in (tuple, frozenset) and len(value) <= _MOST_ITEMS:
            items = [self.of(one) for one in value]
            if any(item is not one for item, one in zip(items, value, strict=True)):
                return type(value)(items)
        return value


def _containers(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, CONTAINERS) and depth <= _MOST_DEEP:
        yield value
        for one in value.values() if isinstance(value, dict) else value:
            yield from _containers(one, depth + 1)
