# SPDX-License-Identifier: Apache-2.0
"""Tensors outside of the models that a step writes to, as averages in a dict: they are state.

A trace finds them; the next one has them among the buffers. Until then a write goes to a fake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from amp_ir.capture.alias_sets import shared_memory
from amp_ir.capture.constant_values import is_from_outside
from amp_ir.capture.dense_tensors import is_dense
from amp_ir.capture.outside_tensors import geometry
from amp_ir.capture.state import StateTensor
from amp_ir.ir.memory_overlap import storage_address
from amp_ir.ir.unusable_tensors import tensor_error

_Names = Mapping[int, tuple[torch.Tensor, Callable[[], str]]]


class WrittenOutside:
    """The tensors outside of the models that one traced step writes to.

    `names` are the user's tensors that guards find where they are held.
    """

    def __init__(self, names: _Names, state: Sequence[StateTensor]) -> None:
        self._names = names
        self._state = {storage_address(one.tensor) for one in state if one.tensor.numel()}
        self._sources: dict[torch.fx.Node, torch.Tensor | None] = {}
        self._found: dict[int, tuple[torch.Tensor, str]] = {}

    @property
    def found(self) -> list[tuple[torch.Tensor, str]]:
        """The tensors, with their names."""
        return list(self._found.values())

    def source(self, target: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor from outside in whose memory a traced one is; None for others."""
        if not isinstance(target, FakeTensor):
            return target
        mode = get_proxy_mode()
        slot = None if mode is None else get_proxy_slot(target, mode.tracer, None)
        if mode is None or slot is None:
            return None
        root: Any = getattr(mode.tracer, "root", None)
        node: torch.fx.Node | None = slot.proxy.node
        passed: list[torch.fx.Node] = []
        found = None
        while node is not None:
            if node in self._sources:
                found = self._sources[node]
                break
            passed.append(node)
            if node.op == "get_attr":
                held = getattr(root, str(node.target))
                is_users = is_from_outside(node) and not isinstance(held, FakeTensor)
                found = held if is_users else None
            node = next(iter(shared_memory(node)), None)
        self._sources.update(dict.fromkeys(passed, found))
        return found

    def take(self, tensor: torch.Tensor) -> bool:
        """Make a tensor from outside state of the next trace; return whether it can be."""
        if not tensor.numel():
            return False
        key = geometry(tensor)
        for own, name_of in list(self._names.values()):
            if geometry(own) == key and _may_be_state(own):
                address = storage_address(own)
                if address in self._state:
                    return False
                known = self._found.get(address)
                if known is None:
                    self._found[address] = own, name_of()
                return known is None or geometry(known[0]) == key
        return False

    def as_traced(self, value: object) -> object:
        """Return a view of an argument that is from outside and written, to go on with."""
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            if value.numel() and storage_address(value) in self._found:
                return torch.ops.aten.alias.default(value)
        return value


def _may_be_state(tensor: torch.Tensor) -> bool:
    is_plain = not (tensor.requires_grad or tensor.is_complex())
    return is_plain and is_dense(tensor) and tensor_error(tensor) is None
