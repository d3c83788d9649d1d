# SPDX-License-Identifier: Apache-2.0
"""`p.data = value` in a traced step: the value is copied into the memory of `p`.

In PyTorch `p` leaves its memory and shares that of the value. What was taken as `p.data` before
keeps the old numbers there: a backup that a step puts back, or one half of a swap. Here it gets a
copy of them before they are overwritten. A value that the step has made shares the memory of `p`
from then on: what is written to one of them shows in the other. That two tensors that the step was
given share memory after it cannot be so, and is refused.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, set_proxy_slot
from torch.utils.weak import WeakIdKeyDictionary

from amp_ir.capture.diagnostics import Diagnostics
from amp_ir.capture.locations import Locator
from amp_ir.ir.location import Location

aten = torch.ops.aten
_DATA: Any = torch.Tensor.data
_SET_DATA = _DATA.__set__
# What they return shares the memory of their argument, and is a tensor of its own.
SHARING = (_DATA.__get__, torch.Tensor.detach, torch.detach)


class _Memory:
    """Memory in PyTorch: which tensors share it there."""


@attrs.frozen(eq=False)
class _Assignment:
    """An assignment of a tensor that the step was given, at the node that copies it."""

    target: torch.Tensor
    memory: _Memory
    source: fx.Node | None
    copy: fx.Node
    place: Location


class DataAssignments:
    """The assignments of `.data` in one traced step."""

    def __init__(self, diagnostics: Diagnostics, locator: Locator) -> None:
        self._diagnostics = diagnostics
        self._locator = locator
        self._memory = WeakIdKeyDictionary()
        # What shares the memory of another tensor here, too.
        self._sharing = WeakIdKeyDictionary()
        # The memory of what the step was given, by its node.
        self._given: dict[fx.Node, _Memory] = {}
        self._assigned: list[_Assignment] = []

    def shares(self, source: torch.Tensor, result: torch.Tensor) -> None:
        """Record what `source.data` returned."""
        self._sharing[result] = self._memory[result] = self._of(source)

    def assign(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """Copy a value, and before it the old numbers for whoever still holds them."""
        memory = self._of(value)
        old = self._of(target)
        if memory is old:
            return
        source, is_given = _source(value)
        with torch.no_grad():
            for holder in self._holders(target, old):
                _put(holder, aten.clone.default(holder))
                self._sharing.pop(holder, None)
            aten.copy_.default(target, value)
            if is_given:
                copy, place = _node(target), self._locator.here()
                assert copy is not None
                self._assigned.append(_Assignment(target, memory, source, copy, place))
            else:
                for one in [one for one, held in self._memory.items() if held is memory]:
                    _put(one, aten.detach.default(target))
                    self._sharing[one] = memory
        self._memory[target] = memory

    def finish(self, state: dict[str, torch.Tensor]) -> None:
        """Refuse a step after which a tensor of the state, by its name, shares memory.

        That of another tensor of the state is refused, and that of a tensor of the batch or from
        outside, where the step writes to it.
        """
        if not self._assigned:
            return
        owners: dict[int, str] = {}
        for name, tensor in state.items():
            other = owners.setdefault(id(self._of(tensor)), name)
            if other != name:
                self._diagnostics.add(
                    f"assigns the data of one of {other} and {name} to the other, after which both "
                    "share memory",
                    self._locator.here(),
                    "Copy it: one.data.copy_(other.data), or one.data = other.data.clone()",
                )
        names = {id(tensor): name for name, tensor in state.items()}
        own = {_source(tensor)[0] for tensor in state.values()} - {None}
        for one in self._assigned:
            is_left = self._of(one.target) is not one.memory
            if not is_left and one.source not in own and _is_written_after(one):
                self._diagnostics.add(
                    f"assigns a tensor that it was given to the data of {names[id(one.target)]}, "
                    "and writes to it, which changes both",
                    one.place,
                    "Copy it: p.data.copy_(value), or p.data = value.clone()",
                )

    def _holders(self, target: torch.Tensor, old: _Memory) -> list[torch.Tensor]:
        """Return what else has the memory that `target` leaves, such as views of it."""
        here = target.untyped_storage()._cdata
        known = [one for one, held in self._sharing.items() if held is old]
        views = [
            one
            for one in _tracer().tensor_tracker
            if type(one) is FakeTensor
            and one.layout is torch.strided
            and one not in self._memory
            and one.untyped_storage()._cdata == here
        ]
        return [one for one in [*known, *views] if one is not target]

    def _of(self, tensor: torch.Tensor) -> _Memory:
        known = self._memory.get(tensor)
        if known is None:
            source, is_given = _source(tensor)
            known = self._given.setdefault(source, _Memory()) if is_given and source else _Memory()
            self._memory[tensor] = known
        found: _Memory = known
        return found


def _tracer() -> Any:
    proxy_mode = get_proxy_mode()
    assert proxy_mode is not None
    return proxy_mode.tracer


def _node(tensor: torch.Tensor) -> fx.Node | None:
    slot = get_proxy_slot(tensor, _tracer(), None)
    return None if slot is None else slot.proxy.node


def _source(value: torch.Tensor) -> tuple[fx.Node | None, bool]:
    """Return the node whose memory a value is in, and whether the step was given that."""
    node = _node(value)
    return (None, True) if node is None else _source_of(node)


def _source_of(node: fx.Node) -> tuple[fx.Node, bool]:
    while isinstance(node.target, torch._ops.OpOverload):
        first = node.target._schema.arguments[:1]
        if not first or first[0].alias_info is None or not isinstance(node.args[0], fx.Node):
            return node, False
        node = node.args[0]
    return node, node.op != "call_function"


def _is_written_after(one: _Assignment) -> bool:
    """Return whether the step writes to what it has assigned, or to where."""
    shared = {one.source, _source_of(one.copy)[0]}
    node = one.copy.next
    while node.op != "root":
        if isinstance(node.target, torch._ops.OpOverload):
            written = [
                given
                for argument, given in zip(node.target._schema.arguments, node.args, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            given_nodes = [one for one in written if isinstance(one, fx.Node)]
            if any(_source_of(one)[0] in shared for one in given_nodes):
                return True
        node = node.next
    return False


def _put(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Let a tensor be another one from here on, in the trace too."""
    tracer = _tracer()
    _SET_DATA(tensor, value)
    set_proxy_slot(tensor, tracer, get_proxy_slot(value, tracer))
