# SPDX-License-Identifier: Apache-2.0
"""The modes, train or eval, in which a traced step leaves modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from amp_ir.capture.guards.places import Place


@attrs.frozen(eq=False)
class ModuleModes:
    """Modules whose modes a step changes, and their modes before it, True for train."""

    modules: tuple[torch.nn.Module, ...]
    before: tuple[bool, ...]

    def name(self) -> str:
        """Return how a message calls the modes."""
        return f"the mode of {len(self.modules)} modules"

    def now(self) -> tuple[bool, ...]:
        """Return their modes."""
        return tuple([one.training for one in self.modules])

    def holds(self) -> bool:
        """Return whether all have the modes from before the step."""
        return self.now() == self.before

    def put(self, modes: Sequence[bool]) -> None:
        """Set their modes."""
        for one, mode in zip(self.modules, modes, strict=True):
            if one.training is not mode:
                one.training = mode

    def put_back(self) -> None:
        """Set the modes from before the step."""
        self.put(self.before)


class KnownModes:
    """The modes of modules as they were when a step first met them."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[torch.nn.Module, bool]] = {}
        # By the ids of the modules and of the dictionaries of their attributes.
        self._modules: dict[int, torch.nn.Module] = {}

    def add(self, module: torch.nn.Module) -> None:
        """Record a module and its submodules, unless it is known."""
        if id(module) in self._before:
            return
        for one in module.modules():
            self._before.setdefault(id(one), (one, one.training))
            self._modules.update({id(one): one, id(vars(one)): one})

    def before(self, place: Place) -> bool | None:
        """Return the mode that a place holds before the step; None where it holds none."""
        module = self._modules.get(id(place.holder)) if place.key == "training" else None
        return None if module is None else self._before[id(module)][1]

    def changed(self, is_made: Callable[[torch.nn.Module], bool]) -> ModuleModes | None:
        """Return those of another mode now, which the step has not made; None where none is."""
        pairs = [
            (one, mode)
            for one, mode in self._before.values()
            if one.training is not mode and not is_made(one)
        ]
        return ModuleModes(*zip(*pairs, strict=True)) if pairs else None
