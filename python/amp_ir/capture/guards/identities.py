# SPDX-License-Identifier: Apache-2.0
"""The identity of the user's tensors, which their fakes take over while a step is captured.

Modules and optimizers hold fakes then, and the user's own lists, sets and dictionaries the tensors
that these stand for. `p in decayed`, `masks[p]`, `id(p) in ids` and `p is q` have to be what they
are in PyTorch: hash and `id` of a fake are those of its tensor, the two are equal in a look-up, and
what is observed of the user's objects holds the fake while the step runs (`stand_ins`). A fake is
an instance of the user's subclass of Parameter that its tensor is of, too; `kinds` has its type.
"""

from __future__ import annotations

import contextlib
import opcode
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from amp_ir.capture.guards.kinds import kind_unless_known, let_fakes_tell, type_that_asks
from amp_ir.capture.patches.restores import restoring
from amp_ir.capture.patches.thread_patches import patch

_OF_PARAMETERS: Any = type(torch.nn.Parameter)
_ABSENT = object()


class Identities:
    """What tells tensors apart in Python, in one trace.

    `fakes` are by the ids of their tensors, `tensors` by those of their fakes. `builtins` are what
    code of the user's calls for `id` and `type`, by these names: of a fake they return what those
    do of its tensor.
    """

    def __init__(self) -> None:
        self.fakes: dict[int, torch.Tensor] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self._ids: dict[int, int] = {}
        self._kinds: dict[int, type] = {}
        self._modules: list[tuple[dict[str, Any], str, Any, Any]] = []
        ids, kinds = self._ids, self._kinds

        def id_of(value: object) -> int:
            own = id(value)
            return ids.get(own, own)

        def kind_of(value: object) -> type:
            return kinds.get(id(value)) or kind_unless_known(value)

        self._id_of, self._kind_of = id_of, kind_of
        self.builtins: dict[str, Any] = {"id": id_of, "type": type_that_asks(kind_of)}

    @contextlib.contextmanager
    def taken_over(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
        """Give fakes the hash and the kind of their tensors; the pairs are (tensor, fake)."""
        for tensor, fake in pairs:
            self.fakes[id(tensor)] = fake
            self.tensors[id(fake)] = tensor
            self._ids[id(fake)] = id(tensor)
            self._kinds[id(fake)] = type(tensor)
        with restoring() as restores:
            restores.add(self._take_back)
            patch(restores, FakeTensor, "__hash__", self._id_of)
            let_fakes_tell(restores, self._kind_of)
            # Of every tensor, and not in a mode: hooks of the backward pass look up, too.
            patch(restores, torch.Tensor, "__eq__", self._equality())
            patch(restores, _OF_PARAMETERS, "__instancecheck__", self._instance_check())
            yield

    def _instance_check(self) -> Callable[[type, object], bool]:
        before, kinds = _OF_PARAMETERS.__instancecheck__, self._kinds

        def check(kind: type, instance: object) -> bool:
            return before(kind, instance) or issubclass(kinds.get(id(instance), object), kind)

        return check

    def give(self, module: dict[str, Any], names: Iterable[str]) -> None:
        """Let the functions of a module, which name Python's `id` or `type`, call ours.

        They may do so by another name, too: `T = type`.
        """
        for name in names:
            if name in self.builtins and name not in module:
                self._give(module, name, _ABSENT, self.builtins[name])
            elif (held := module.get(name)) is type or held is id:
                self._give(module, name, held, self.builtins[held.__name__])

    def is_ours(self, value: object) -> bool:
        """Return whether a value is what `give` has put into a module."""
        return any(value is one for one in self.builtins.values())

    def _give(self, module: dict[str, Any], name: str, before: Any, ours: Any) -> None:
        self._modules.append((module, name, before, ours))
        module[name] = ours

    def _take_back(self) -> None:
        for module, name, before, ours in self._modules:
            if module.get(name) is ours:
                if before is _ABSENT:
                    del module[name]
                else:
                    module[name] = before

    def _equality(self) -> Callable[[Any, Any], Any]:
        """Return `==` of tensors, by which a look-up finds a tensor and its fake equal."""
        before, fakes = torch.Tensor.__eq__, self.fakes

        def equality(one: Any, other: Any) -> Any:
            is_pair = fakes.get(id(one), _ABSENT) is other or fakes.get(id(other), _ABSENT) is one
            if is_pair and not _is_written(sys._getframe(1)):
                return True
            return before(one, other)

        return equality


def _is_written(frame: FrameType) -> bool:
    """Return whether the code that runs in `frame` compares with `==`, element by element."""
    return opcode.opname[frame.f_code.co_code[frame.f_lasti]] == "COMPARE_OP"
