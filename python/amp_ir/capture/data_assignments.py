# SPDX-License-Identifier: Apache-2.0
"""`p.data = value` in a traced step: from there on `p` is in the memory of the value.

As in PyTorch, what is written to one of them shows in the other, and in whatever else has this
memory, such as a flat tensor of all parameters. What was taken as `p.data` before, or saved for
the backward pass, stays in the memory that `p` has left. After the step the numbers of `p` are
where they were before it, so two tensors of the state cannot share memory then: that is refused.
What the step was given, and what has one number for several elements, is assigned as a copy, and a
write to that is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, set_proxy_slot

from amp_ir.capture.alias_sets import shared_memory
from amp_ir.capture.diagnostics import Diagnostics
from amp_ir.capture.locations import Locator
from amp_ir.capture.transaction import Transaction
from amp_ir.ir.location import Location

_DATA: Any = torch.Tensor.data
_SET_DATA = _DATA.__set__


@attrs.frozen(eq=False)
class _Copied:
    """A copy that was assigned instead of a value: to which tensor, and where."""

    copy: torch.Tensor
    target: torch.Tensor
    what: str
    place: Location


class DataAssignments:
    """The assignments of `.data` in one traced step; `state` has the fakes of the state."""

    def __init__(
        self,
        state: Collection[torch.Tensor],
        transaction: Transaction,
        diagnostics: Diagnostics,
        locator: Locator,
    ) -> None:
        self._diagnostics = diagnostics
        self._locator = locator
        self._transaction = transaction
        self._own = {_node(fake) for fake in state} - {None}
        self._kinds = {id(fake): (tuple(fake.shape), fake.dtype) for fake in state}
        self._places: dict[int, Location] = {}
        self._copied: list[_Copied] = []
        # Whether a view was assigned.
        self.assigns_parts = False

    def assign(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """Let a tensor have the memory of another one, and its shape and dtype."""
        self._places[id(target)] = self._locator.here()
        with torch.no_grad():
            what = self._why_copied(value)
            if what:
                value = value.clone()
                self._copied.append(_Copied(value, target, what, self._locator.here()))
                self._transaction.watch_writes(value)
            node = _node(value)
            self.assigns_parts |= node is not None and _source(node) is not node
            with self._transaction.moving(target):
                tracer = _tracer()
                slot = get_proxy_slot(value, tracer)
                _SET_DATA(target, value)
                set_proxy_slot(target, tracer, slot)

    def finish(self, state: Mapping[str, torch.Tensor]) -> None:
        """Refuse what a compiled step cannot do, with the tensors of the state by their names.

        That is that two of them share memory after the step, that one has another shape or dtype
        then, and a write to what was assigned as a copy.
        """
        if not self._places:
            return
        for one, other in _sharing(state):
            place = self._places.get(id(state[other])) or self._places[id(state[one])]
            self._diagnostics.add(
                f"assigns the data of one of {one} and {other} to the other, after which both "
                "share memory",
                place,
                "Copy it: one.data.copy_(other.data), or one.data = other.data.clone()",
            )
        names = {id(tensor): name for name, tensor in state.items()}
        for name, tensor in state.items():
            kind, (shape, dtype) = (tuple(tensor.shape), tensor.dtype), self._kinds[id(tensor)]
            if kind != (shape, dtype):
                self._diagnostics.add(
                    f"leaves data of shape {kind[0]} and {kind[1]} in {name}, which is of shape "
                    f"{shape} and {dtype}",
                    self._places[id(tensor)],
                    "Within a step these stay: assign data of the same shape and dtype before it "
                    "ends, or change the model between two steps, for which jit compiles again",
                )
        for copied in self._copied:
            if self._transaction.is_written(copied.copy):
                name = names.get(id(copied.target), "a tensor")
                self._diagnostics.add(
                    f"assigns {copied.what} to the data of {name}, and writes to it, which "
                    "changes both",
                    copied.place,
                    "Copy it: p.data.copy_(value), or p.data = value.clone()",
                )

    def _why_copied(self, value: torch.Tensor) -> str | None:
        if self._is_given(value):
            return "a tensor that it was given"
        if any(by == 0 and n > 1 for n, by in zip(value.shape, value.stride(), strict=True)):
            return "a tensor with one number for several elements, as of expand,"
        return None

    def _is_given(self, value: torch.Tensor) -> bool:
        """Return whether a value is in memory of the batch, or of a tensor from outside."""
        node = _node(value)
        if node is None:
            return True
        source = _source(node)
        return source.op != "call_function" and source not in self._own


def _tracer() -> Any:
    proxy_mode = get_proxy_mode()
    assert proxy_mode is not None
    return proxy_mode.tracer


def _node(tensor: torch.Tensor) -> fx.Node | None:
    slot = get_proxy_slot(tensor, _tracer(), None)
    return None if slot is None else slot.proxy.node


def _source(node: fx.Node) -> fx.Node:
    """Return the node in whose memory the result of another one is."""
    while shared := shared_memory(node):
        node = shared[0]
    return node


def _sharing(state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    by_storage: dict[int, list[str]] = {}
    for name, tensor in state.items():
        by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    for names in by_storage.values():
        for k, name in enumerate(names):
            for other in names[:k]:
                first, second = _range(state[other]), _range(state[name])
                if max(first.start, second.start) < min(first.stop, second.stop):
                    yield other, name


def _range(tensor: torch.Tensor) -> range:
    """Return the bytes of its storage from the first element to the end of the last one."""
    if not tensor.numel():
        return range(0)
    last = sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))
    start, size = tensor.storage_offset(), tensor.element_size()
    return range(start * size, (start + last + 1) * size)
