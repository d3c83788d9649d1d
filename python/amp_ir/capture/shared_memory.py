# SPDX-License-Identifier: Apache-2.0
"""Gradients and optimizer state that share memory with other state.

In PyTorch a write to one of them is a write to both. A compiled step has a value for each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Set

import torch

from amp_ir.capture.state import State, StateTensor
from amp_ir.errors import ArgumentError
from amp_ir.ir.memory_overlap import memory_range
from amp_ir.ir.step_module import Role

_OWN_MEMORY = {
    Role.GRADIENT: "p.grad = p.grad.clone() for one of the parameters",
    Role.OPTIMIZER_STATE: (
        "for one in optimizer.state.values(): one.update({key: value.clone() for key, value in "
        "one.items() if torch.is_tensor(value)})"
    ),
}


def refuse_shared_memory(state: State) -> None:
    """Refuse gradients and optimizer state that are, or overlap, another tensor of the state.

    Raises:
        ArgumentError: naming each pair. Parameters and buffers are checked before.
    """
    new = {
        id(state.optimizer_state[index, id(parameter)][key])
        for index, parameter, key in state.fresh
    }
    entries = [
        entry
        for entry in state.tensors
        if entry.role is not Role.SCALER_STATE and id(entry) not in new
    ]
    wrong = [
        f"{one.name} and {other.name} share memory, where in PyTorch a write to one is a write to "
        f"the other; give each its own before the step: {_how_to_part(one, other)}"
        for one, other in _overlapping(entries)
        if {one.role, other.role} & _OWN_MEMORY.keys()
    ]
    if wrong:
        raise ArgumentError("; ".join(wrong[:3]))


def shared_gradients(state: State, assigned: Set[int]) -> tuple[str, str] | None:
    """Return the names of two parameters whose gradients are one at the end of a traced step.

    One of them is among `assigned`, the ids of the fakes to which the step's own code has assigned
    that of another parameter: what a backward pass gives to two, PyTorch copies for one of them.
    """
    owners: dict[tuple[int, int], StateTensor] = {}
    for entry in state.parameters:
        gradient = entry.fake.grad
        if gradient is not None and gradient.numel():
            place = _storage(gradient), int(gradient.storage_offset())
            other = owners.setdefault(place, entry)
            if other is not entry and {id(other.fake), id(entry.fake)} & assigned:
                return other.name, entry.name
    return None


def _how_to_part(one: StateTensor, other: StateTensor) -> str:
    return _OWN_MEMORY[one.role if one.role in _OWN_MEMORY else other.role]


def _overlapping(entries: Iterable[StateTensor]) -> Iterator[tuple[StateTensor, StateTensor]]:
    """Yield those that overlap; parts of one storage may lie side by side."""
    by_storage: dict[int, list[StateTensor]] = {}
    for entry in entries:
        if entry.tensor.numel():
            by_storage.setdefault(_storage(entry.tensor), []).append(entry)
    for found in by_storage.values():
        if len(found) > 1:
            found.sort(key=lambda one: memory_range(one.tensor).start)
            for one, other in itertools.pairwise(found):
                if memory_range(other.tensor).start < memory_range(one.tensor).stop:
                    yield one, other


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
