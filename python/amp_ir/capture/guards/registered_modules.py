# SPDX-License-Identifier: Apache-2.0
"""Modules that a traced step registers in the user's models: found, put again, and taken out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch


@attrs.frozen(eq=False)
class NewModule:
    """A module that the step made and registered in a module that was there before.

    `before` is what the key led to; `had_key` is False where there was no such submodule.
    """

    parent: torch.nn.Module
    key: str
    child: torch.nn.Module
    before: torch.nn.Module | None
    had_key: bool

    @property
    def holds_tensors(self) -> bool:
        """Whether it has parameters or buffers, which each later step would make anew."""
        return any(True for _ in (*self.child.parameters(), *self.child.buffers()))

    def name(self) -> str:
        """Return how a message calls the place."""
        return f"submodule {self.key!r} of {type(self.parent).__name__}"

    def now(self) -> torch.nn.Module | None:
        """Return the submodule that the parent has."""
        return self.parent._modules.get(self.key)

    def holds(self) -> bool:
        """Return whether the parent has the submodule that it had before the step."""
        submodules = self.parent._modules
        return (self.key in submodules) == self.had_key and submodules.get(self.key) is self.before

    def put_back(self) -> None:
        """Let the parent have the submodule that it had."""
        if self.had_key:
            self.parent._modules[self.key] = self.before
        else:
            del self.parent._modules[self.key]

    def put(self, child: torch.nn.Module) -> None:
        """Register the module again."""
        self.parent._modules[self.key] = child


class RegisteredModules:
    """The submodules of models as they were before a step."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        found = {id(one): one for model in models for one in model.modules()}
        self._before = [(one, dict(one._modules)) for one in found.values()]
        self.known = frozenset(found)

    def new(self) -> Iterator[NewModule]:
        """Return what was registered since; a module without tensors is as good as its like."""
        for parent, before in self._before:
            for key, child in parent._modules.items():
                if child is not None and child is not before.get(key):
                    one = NewModule(parent, key, child, before.get(key), key in before)
                    if one.holds_tensors or not _is_like(child, before.get(key)):
                        yield one

    def restore(self) -> None:
        """Let the modules have the submodules that they had."""
        for parent, before in self._before:
            if list(parent._modules.items()) != list(before.items()):
                parent._modules.clear()
                parent._modules.update(before)


def _is_like(child: torch.nn.Module, before: torch.nn.Module | None) -> bool:
    return type(child) is type(before) and repr(child) == repr(before)
