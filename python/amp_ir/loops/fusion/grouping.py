# SPDX-License-Identifier: Apache-2.0
"""Fusion: which values share a kernel, and which of them get memory.

Greedy, in program order: a value joins the latest group that computes one of its arguments if its
elements line up with that group's loops (`legality.py`) and no dependence cycle between kernels
arises (`unit_order.py`); otherwise it opens a group (`group.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from amp_ir.ir.tensor_layout import dtype_nbytes
from amp_ir.loops.fusion.legality import MAX_BUFFERS, MAX_MEMBERS, fit, own_domain, own_placement
from amp_ir.loops.fusion.unit_order import UnitOrder
from amp_ir.loops.group import Domain, Group, Placement, effective_reads, storage_of
from amp_ir.loops.ir import Buffer, Constant, Opaque, Pointwise, Read, Reduction, Value


class Grouping:
    """Builder of the groups of one program, which then decides the values that get memory.

    `place` and `demand` assign values to groups as the program is read; `finish` decides, once,
    what each group stores and reads. Kernels, library calls and opaque kernels are numbered units.
    `arithmetic_is_free`: a kernel takes the time of its bytes.
    """

    def __init__(self, *, arithmetic_is_free: bool = False) -> None:
        self._arithmetic_is_free = arithmetic_is_free
        self.groups: list[Group] = []
        self.group_of: dict[int, Group] = {}
        self.units = UnitOrder()
        self._read_cache: dict[int, list[Read]] = {}
        self._unit_of: dict[int, int] = {}
        self._demanded: dict[int, Value] = {}
        # What library calls and hand-written kernels read and make.
        self.read_by_unit: dict[int, list[Value]] = {}
        self.made_by_unit: dict[int, list[Value]] = {}
        # The groups that read a value, by its id; a merged group maps to the group that it is in.
        self._readers_of: dict[int, set[int]] = {}
        self._by_number: dict[int, Group] = {}
        # No value joins a group with a lower number.
        self._first_open = 0

    def close_groups(self) -> None:
        """Let no further value join the groups that there are."""
        self._first_open = len(self.units.ancestors)

    def add_unit(self, arguments: Iterable[Value]) -> int:
        """Add a library call or opaque kernel that loads `arguments`; return its unit number."""
        owners = [self.demand(value) for value in arguments]
        unit = self.units.add(self._units_read(owners))
        self.read_by_unit[unit] = owners
        return unit

    def produced_by(self, value: Value, unit: int) -> None:
        """Record that a unit produces `value` (a Buffer or Opaque)."""
        self._unit_of[id(value)] = unit
        self.made_by_unit.setdefault(unit, []).append(value)

    def unit_of(self, value: Value) -> int | None:
        """Return the library call or opaque kernel that produces `value`, if any."""
        return self._unit_of.get(id(value))

    def reads(self, value: Value) -> list[Read]:
        """Return what `value` reads from memory or from other members, looking through views."""
        return effective_reads(value, self._read_cache)

    def demand(self, value: Value) -> Value:
        """Require `value` in memory; return the value that owns the memory."""
        owner = storage_of(value)
        if isinstance(owner, (Pointwise, Reduction)):
            self.place(owner)
            self._demanded[id(owner)] = owner
        return owner

    def place(self, value: Value) -> None:
        """Assign `value`, and all that it needs, to a group."""
        stack = [value]
        while stack:
            top = stack[-1]
            if id(top) in self.group_of or isinstance(top, (Buffer, Constant, Opaque)):
                stack.pop()
                continue
            waiting = [
                read.value
                for read in self.reads(top)
                if isinstance(read.value, (Pointwise, Reduction))
                and id(read.value) not in self.group_of
            ]
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            self._assign(top)

    def _assign(self, value: Value) -> None:
        reads = self.reads(value)
        candidates = self._candidates(reads)
        readers = self._reduction_candidates(value, reads) if isinstance(value, Reduction) else []
        for group in [*candidates, *readers]:
            fitted = fit(value, reads, group)
            if fitted is not None and self._can_join(reads, group):
                self._enter(value, group, *fitted)
                before = self._units_read(read.value for read in reads)
                self.units.add_before(group.number, before - {group.number})
                for other in candidates:
                    if other is not group:
                        self._merge_group(other, group)
                return
        unit = self.units.add(self._units_read(read.value for read in reads))
        group = Group(unit, own_domain(value))
        self.groups.append(group)
        self._by_number[unit] = group
        self._enter(value, group, group.domain, own_placement(value))

    def _candidates(self, reads: list[Read]) -> list[Group]:
        """Return the groups that compute an argument: those with reductions first, then latest.

        Arithmetic can move to where a reduction is (`_merge_group`), not the other way round.
        """
        groups: dict[int, Group] = {}
        for read in reads:
            group = self.group_of.get(id(read.value))
            if group is not None and group.number >= self._first_open:
                groups[group.number] = group

        def rank(number: int) -> tuple[bool, int]:
            return bool(groups[number].row or groups[number].column), number

        return [groups[number] for number in sorted(groups, key=rank, reverse=True)]

    def _reduction_candidates(self, value: Reduction, reads: list[Read]) -> list[Group]:
        """Return the groups that read all of a tensor from memory, as `value` does, latest first.

        Only for reductions: their results are small, so nothing large has to wait in memory for a
        reader because it was computed early.
        """
        size = math.prod(value.source_shape)
        groups: dict[int, Group] = {}
        for read in reads:
            if read.value.size == size:
                home = self.group_of.get(id(read.value))
                for number in self._readers_of.get(id(read.value), ()):
                    group = self._by_number[number]
                    is_open = number >= self._first_open and group is not home
                    if is_open and _gates(group) == value.is_gate:
                        groups[group.number] = group
        return [groups[number] for number in sorted(groups, reverse=True)]

    def _enter(self, value: Value, group: Group, domain: Domain, kind: Placement) -> None:
        group.domain = domain
        getattr(group, kind).append(value)
        for read in self.reads(value):
            group.read_ids.add(id(read.value))
            self._readers_of.setdefault(id(read.value), set()).add(group.number)
        self.group_of[id(value)] = group
        self._unit_of[id(value)] = group.number

    def _merge_group(self, small: Group, into: Group) -> None:
        """Merge a group of arithmetic into another that reads it, where the loops agree."""
        if small.row or small.column or len(small.full) + len(into.members) > MAX_MEMBERS:
            return
        if not self.units.can_merge(small.number, into.number) or not self._agree(small, into):
            return
        self.groups.remove(small)
        into.full = small.full + into.full
        into.read_ids |= small.read_ids
        for number, group in self._by_number.items():
            if group is small:
                self._by_number[number] = into
        for value in small.full:
            self.group_of[id(value)] = into
            self._unit_of[id(value)] = into.number
        self.units.merge(small.number, into.number)

    def _agree(self, small: Group, into: Group) -> bool:
        if small.domain.size != into.domain.size:
            return False
        inside = {id(value) for value in into.members}
        moved = {id(value) for value in small.full}
        buffers: set[int] = set()
        for value in small.full:
            if not into.domain.is_trailing and value.shape != into.domain.shape:
                return False
            if any(id(read.value) in inside for read in self.reads(value)):
                return False
        for value in into.members:
            is_full = any(value is other for other in into.full) or isinstance(value, Reduction)
            for read in self.reads(value):
                if id(read.value) in moved and not (is_full and read.place in ("same", "flat")):
                    return False
        for value in [*small.full, *into.members]:
            buffers |= {id(read.value) for read in self.reads(value)} - inside - moved
        return len(buffers) <= MAX_BUFFERS

    def _can_join(self, reads: list[Read], group: Group) -> bool:
        """Return whether no argument waits for a unit that itself waits for the group."""
        for read in reads:
            unit = self._unit_of.get(id(read.value))
            if unit is not None and unit != group.number and self.units.waits(unit, group.number):
                return False
        return True

    def _units_read(self, values: Iterable[Value]) -> set[int]:
        """Return the units that make `values`."""
        units = (self._unit_of.get(id(value)) for value in values)
        return {unit for unit in units if unit is not None}

    # After the last value: what is stored.

    def finish(self) -> list[Group]:
        """Decide what each group stores and reads; no group changes its members afterwards.

        Ensures: every group in the result stores something.
        """
        self._choose_recomputed()
        waiting = list(self._demanded.values())
        stored: set[int] = set()
        while waiting:
            value = waiting.pop()
            if id(value) in stored:
                continue
            stored.add(id(value))
            group = self.group_of[id(value)]
            group.stored.append(value)
            waiting += self._read_outside(value, group)
        groups = [group for group in self.groups if group.stored]
        for group in groups:
            group.stored.sort(key=lambda value: value.serial)
            self._keep_needed(group)
        return groups

    def _read_outside(self, value: Value, group: Group) -> list[Value]:
        """Return members of other groups that `value` reads in `group`; record the inputs."""
        demanded: list[Value] = []
        stack, seen = [value], set()
        while stack:
            top = stack.pop()
            if id(top) in seen:
                continue
            seen.add(id(top))
            for read in self.reads(top):
                owner = read.value
                home = self.group_of.get(id(owner))
                if home is group:
                    stack.append(owner)
                elif not isinstance(owner, Constant):
                    group.inputs[id(owner)] = owner
                    if home is not None:
                        demanded.append(owner)
        return demanded

    def _keep_needed(self, group: Group) -> None:
        """Drop members that nothing stored depends on."""
        needed: set[int] = set()
        stack = list(group.stored)
        while stack:
            value = stack.pop()
            if id(value) not in needed:
                needed.add(id(value))
                stack += [
                    read.value
                    for read in self.reads(value)
                    if self.group_of.get(id(read.value)) is group
                ]
        group.full = [value for value in group.full if id(value) in needed]
        group.row = [value for value in group.row if id(value) in needed]
        group.column = [value for value in group.column if id(value) in needed]
        if not group.row and not group.column:
            # No reduction is left to fix the columns: the loops are free again.
            group.domain = Domain(group.domain.shape, None)

    def _choose_recomputed(self) -> None:
        """Let readers in other kernels recompute cheap values instead of storing them.

        A value is cheap when it reads at most one tensor of its own size, which is in memory
        anyway and is not wider: reading that instead of the value saves the value's write. Where
        arithmetic is free it may read several, together not wider. An integer is stored before it
        is widened. A scalar's write costs nothing, and its readers would compute it once for each
        element.
        """
        outside = self._values_read_outside()
        for value in sorted(outside.values(), key=lambda value: -value.serial):
            if id(value) in self._demanded or not isinstance(value, Pointwise):
                continue
            if value.size > 1 and not value.is_kept and self._is_cheap(value, outside):
                value.is_view = True
        self._read_cache.clear()

    def _values_read_outside(self) -> dict[int, Value]:
        found: dict[int, Value] = {}
        for group in self.groups:
            for value in group.members:
                for read in self.reads(value):
                    home = self.group_of.get(id(read.value))
                    if home is not None and home is not group:
                        found[id(read.value)] = read.value
        return found

    def _is_cheap(self, value: Pointwise, outside: dict[int, Value]) -> bool:
        home = self.group_of[id(value)]
        if any(value is member for member in home.row):
            return False
        large: list[int] = []
        for read in self.reads(value):
            owner = read.value
            in_memory = id(owner) in outside or id(owner) in self._demanded
            if id(owner) in self.group_of and not in_memory and not _widens(value, owner):
                return False
            if owner.size * 8 > value.size:
                large.append(_nbytes(owner))
                if read.place not in ("same", "flat"):
                    return False
        return sum(large) <= _nbytes(value) and (len(large) <= 1 or self._arithmetic_is_free)


def _gates(group: Group) -> bool:
    """Return whether a kernel only makes scalars that readers of its arguments wait for."""
    gates = [one for one in group.members if isinstance(one, Reduction) and one.is_gate]
    return bool(gates) and all(one.size == 1 for one in group.members)


def _widens(value: Value, source: Value) -> bool:
    """Return whether a value is `source` or what that determines, in a wider integer dtype.

    Of floats the narrow one is rounded only if it is stored.
    """
    are_integers = value.dtype.startswith("int") and source.dtype.startswith("int")
    return are_integers and value.size == source.size and _nbytes(source) < _nbytes(value)


def _nbytes(value: Value) -> int:
    return value.size * dtype_nbytes(value.dtype)
