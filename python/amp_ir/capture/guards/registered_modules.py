# SPDX-License-Identifier: Apache-2.0
"""Modules and tensors that a traced step registers in the user's models, or takes out of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

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


@attrs.frozen(eq=False)
class ChangedTensor:
    """A parameter or buffer that a module has and had not before the step; None: one that is gone.

    A buffer that was None counts as one that the module had not.
    """

    parent: torch.nn.Module
    kind: str
    key: str
    tensor: torch.Tensor | None

    def name(self) -> str:
        """Return how a message calls the place."""
        return f"{self.kind} {self.key!r} of {type(self.parent).__name__}"


class RegisteredModules:
    """The submodules, parameters and buffers of models as they were before a step."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        found = {id(one): one for model in models for one in model.modules()}
        self._before = [(one, dict(one._modules)) for one in found.values()]
        self._tensors = [(one, [_keys(it) for it in _tables(one)]) for one in found.values()]
        self.known = frozenset(found)

    def new(self) -> Iterator[NewModule]:
        """Return what was registered since; a module without tensors is as good as its like."""
        for parent, before in self._before:
            for key, child in parent._modules.items():
                if child is not None and child is not before.get(key):
                    one = NewModule(parent, key, child, before.get(key), key in before)
                    if one.holds_tensors or not _is_like(child, before.get(key)):
                        yield one

    def changed_tensors(self) -> Iterator[ChangedTensor]:
        """Return what other keys lead to tensors than before; another tensor is not looked for."""
        for parent, keys in self._tensors:
            kinds = zip(("parameter", "buffer"), _tables(parent), keys, strict=True)
            for kind, table, before in kinds:
                for key in _keys(table) - before:
                    yield ChangedTensor(parent, kind, key, table[key])
                for key in before - table.keys():
                    yield ChangedTensor(parent, kind, key, None)

    def restore(self) -> None:
        """Let the modules have the submodules that they had."""
        for parent, before in self._before:
            if list(parent._modules.items()) != list(before.items()):
                parent._modules.clear()
                parent._modules.update(before)


def _tables(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


def _keys(table: dict[str, Any]) -> set[str]:
    return {key for key, tensor in table.items() if tensor is not None}


def _is_like(child: torch.nn.Module, before: torch.nn.Module | None) -> bool:
    return type(child) is type(before) and repr(child) == repr(before)
