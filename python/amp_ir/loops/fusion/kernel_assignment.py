# SPDX-License-Identifier: Apache-2.0
"""Kernel assignment: which kernel computes each value of a step, and what is stored in memory.

No kernel is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import tvm
from tvm import relax

from amp_ir.loops.builders import channels_last
from amp_ir.loops.fusion.fuse import group_values
from amp_ir.loops.fusion.grouping import Grouping
from amp_ir.loops.group import Group, storage_of
from amp_ir.loops.ir import Pointwise, Value


@attrs.frozen
class KernelAssignment:
    """The kernel or library call that computes a value, and whether it does nothing but cast."""

    kernel: int
    only_casts: bool


def assign_kernels(ir: tvm.IRModule) -> dict[relax.Var, KernelAssignment]:
    """Assign every bound value to the kernel or library call that computes it.

    Views, and values that each reader recomputes, have no kernel of their own and are left out. A
    value with several results counts by its first.

    Requires: as `fuse_loops`.
    """
    values, grouping = group_values(ir)
    found = {}
    for variable, value in values.items():
        place = _place(grouping, value)
        if place is not None:
            found[variable] = place
    return found


@attrs.frozen
class Stored:
    """A tensor that kernels and library calls write or read, by their numbers.

    `variables` are those of the step that share this memory, in order, views of it included;
    `written_by` is None for an input or a constant.
    """

    variables: tuple[relax.Var, ...]
    dtype: str
    elements: int
    written_by: int | None
    read_by: tuple[int, ...]


def stored_tensors(ir: tvm.IRModule) -> list[Stored]:
    """Return every tensor in memory while the step runs, with its readers and writers.

    Requires: as `fuse_loops`.
    """
    values, grouping = group_values(ir)
    writers: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    tensors: dict[int, Value] = {}
    for unit, reads, makes in _accesses(grouping):
        for value in {id(storage_of(one)): storage_of(one) for one in reads}.values():
            readers.setdefault(id(value), []).append(unit)
            tensors[id(value)] = value
        for value in makes:
            writers[id(value)] = unit
            tensors[id(value)] = value
    names: dict[int, list[relax.Var]] = {}
    for variable, value in values.items():
        for leaf in _leaves(value):
            owner = storage_of(channels_last(leaf) or leaf)
            names.setdefault(id(owner), []).append(variable)
    return [
        Stored(
            tuple(names.get(key, ())),
            value.dtype,
            value.size,
            writers.get(key),
            tuple(readers.get(key, ())),
        )
        for key, value in tensors.items()
    ]


def _accesses(grouping: Grouping) -> Iterator[tuple[int, Iterable[Value], Iterable[Value]]]:
    """Return the number of each kernel and library call, what it reads and what it writes."""
    for group in grouping.groups:
        if group.stored:
            yield group.number, group.inputs.values(), group.stored
    for unit, reads in grouping.read_by_unit.items():
        yield unit, reads, grouping.made_by_unit.get(unit, ())


def _leaves(value: Any) -> list[Value]:
    if isinstance(value, tuple):
        return [leaf for field in value for leaf in _leaves(field)]
    return [value] if isinstance(value, Value) else []


def _place(grouping: Grouping, value: Any) -> KernelAssignment | None:
    while isinstance(value, tuple) and value:
        value = value[0]
    if not isinstance(value, Value):
        return None
    owner = storage_of(channels_last(value) or value)
    group = grouping.group_of.get(id(owner))
    if group is not None:
        is_made = group.stored and any(owner is one for one in group.members)
        return KernelAssignment(group.number, _only_casts(grouping, group)) if is_made else None
    unit = grouping.unit_of(owner)
    return None if unit is None else KernelAssignment(unit, False)


def _only_casts(grouping: Grouping, group: Group) -> bool:
    # A kernel that reads nothing fills memory with a number, and would in any dtype.
    return bool(group.inputs) and not any(_computes(grouping, one) for one in group.members)


def _computes(grouping: Grouping, value: Value) -> bool:
    """Return whether a member does more than cast, itself or through values it recomputes."""
    if not isinstance(value, Pointwise):
        return True
    # Lowerings mark arithmetic that readers recompute as views; moves have one source.
    is_move = id(value) not in grouping.group_of and len({id(one.value) for one in value.reads}) < 2
    if not (value.is_cast or is_move):
        return True
    recomputed = [one.value for one in value.reads if isinstance(one.value, Pointwise)]
    return any(one.is_view and _computes(grouping, one) for one in recomputed)
