# SPDX-License-Identifier: Apache-2.0
"""Modules that a traced step registers in the user's models: found, put again, and taken out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch


@attrs.frozen(eq=False)
class NewModule:
    """A module that the step made and registered in a module that was there before."""

    parent: torch.nn.Module
    key: str
    child: torch.nn.Module

    @property
    def holds_tensors(self) -> bool:
        """Whether it has parameters or buffers, which each later step would make anew."""
        return any(True for _ in (*self.child.parameters(), *self.child.buffers()))

    def put(self, child: torch.nn.Module) -> None:
        """Register the module again."""
        self.parent._modules[self.key] = child


class RegisteredModules:
    """The submodules of models as they were before a step."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        found = {id(one): one for model in models for one in model.modules()}
        self._before = [(one, dict(one._modules)) for one in found.values()]

    def new(self) -> Iterator[NewModule]:
        """Return what was registered since; a module without tensors is as good as its like."""
        for parent, before in self._before:
            for key, child in parent._modules.items():
                if child is not None and child is not before.get(key):
                    one = NewModule(parent, key, child)
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
