# SPDX-License-Identifier: Apache-2.0
"""`p.data = value` in a traced step: the value is copied into the memory of `p`.

In PyTorch `p` leaves its memory and shares that of the value. What was taken as `p.data` before
keeps the old numbers there: a backup that a step puts back, or one half of a swap. Here it gets a
copy of them before they are overwritten. That two tensors of the state share memory after the step
cannot be so, and is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, set_proxy_slot
from torch.utils.weak import WeakIdKeyDictionary

from amp_ir.capture.diagnostics import Diagnostics
from amp_ir.capture.locations import Locator

aten = torch.ops.aten
_DATA: Any = torch.Tensor.data
_SET_DATA = _DATA.__set__
# What they return shares the memory of their argument, and is a tensor of its own.
SHARING = (_DATA.__get__, torch.Tensor.detach, torch.detach)


class _Memory:
    """Memory in PyTorch: which tensors share it there."""


class DataAssignments:
    """The assignments of `.data` in one traced step."""

    def __init__(self, diagnostics: Diagnostics, locator: Locator) -> None:
        self._diagnostics = diagnostics
        self._locator = locator
        self._memory = WeakIdKeyDictionary()
        # What shares the memory of another tensor here, too.
        self._sharing = WeakIdKeyDictionary()
        self._assigned: list[torch.Tensor] = []

    def shares(self, source: torch.Tensor, result: torch.Tensor) -> None:
        """Record what `source.data` returned."""
        self._sharing[result] = self._memory[result] = self._of(source)

    def assign(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """Copy a value, and before it the old numbers for whoever still holds them."""
        memory = self._of(value)
        old = self._of(target)
        if memory is old:
            return
        with torch.no_grad():
            holders = [one for one, held in self._sharing.items() if held is old]
            for holder in holders:
                _put(holder, aten.clone.default(target))
                del self._sharing[holder]
            aten.copy_.default(target, value)
        self._memory[target] = memory
        self._assigned.append(target)

    def finish(self, state: dict[str, torch.Tensor]) -> None:
        """Refuse a step after which two tensors of the state, by their names, share memory."""
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

    def _of(self, tensor: torch.Tensor) -> _Memory:
        known = self._memory.get(tensor)
        if known is None:
            known = self._memory[tensor] = _Memory()
        found: _Memory = known
        return found


def _put(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Let a tensor be another one from here on, in the trace too."""
    proxy_mode = get_proxy_mode()
    assert proxy_mode is not None
    _SET_DATA(tensor, value)
    set_proxy_slot(tensor, proxy_mode.tracer, get_proxy_slot(value, proxy_mode.tracer))
