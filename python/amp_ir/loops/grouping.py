# SPDX-License-Identifier: Apache-2.0
"""Which values share a kernel, and which of them get memory.

A group is one kernel: a row loop, and inside of it loops over the columns of the row. A domain says
which dimensions are rows and which are columns. Members are FULL (one element per row and column),
ROW (one per row: what a reduction over the columns leaves, and arithmetic on that) or COLUMN (one
per column: what a reduction over the rows leaves; known when the kernel ends).

Greedy, in program order: a value joins the latest group that computes one of its arguments if its
elements line up with that group's loops and no dependence cycle between kernels arises; otherwise
it opens a group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Literal

import attrs

from amp_ir.loops.ir import Buffer, Constant, Opaque, Pointwise, Read, Reduction, Value
from amp_ir.loops.kernel_buffers import dtype_nbytes

MAX_MEMBERS = 48
MAX_BUFFERS = 24


@attrs.frozen
class Domain:
    """The loops of a kernel over an index space of `shape`.

    `axes` are the column dimensions, or None while no reduction has fixed them. `size` is the
    number of elements.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...] | None

    @property
    def size(self) -> int:
        """Number of elements of a FULL value."""
        return math.prod(self.shape)

    @property
    def columns(self) -> int:
        """Number of elements in a row."""
        return math.prod(self.shape[axis] for axis in self.axes or ())

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.size // self.columns

    @property
    def is_trailing(self) -> bool:
        """Whether the columns are the last dimensions, so that a row is contiguous."""
        if self.axes is None:
            return True
        significant = [d for d, n in enumerate(self.shape) if n > 1]
        columns = [d for d in significant if d in self.axes]
        return columns == significant[len(significant) - len(columns) :]

    @property
    def keeps_innermost(self) -> bool:
        """Whether the reduction runs over outer dimensions: one result a column of memory."""
        if self.axes is None:
            return False
        significant = [d for d, n in enumerate(self.shape) if n > 1]
        return bool(significant) and significant[-1] not in self.axes


@attrs.define(eq=False)
class Group:
    """The values that one kernel computes; `read_ids` are the ids of all that its members read."""

    number: int
    domain: Domain
    full: list[Value] = attrs.field(factory=list)
    row: list[Value] = attrs.field(factory=list)
    column: list[Value] = attrs.field(factory=list)
    inputs: dict[int, Value] = attrs.field(factory=dict)
    stored: list[Value] = attrs.field(factory=list)
    read_ids: set[int] = attrs.field(factory=set)

    @property
    def members(self) -> list[Value]:
        """All values of the group."""
        return self.full + self.row + self.column


Placement = Literal["full", "row", "column"]


def storage_of(value: Value) -> Value:
    """The value whose memory holds `value`: a reshape has none of its own."""
    while isinstance(value, Pointwise) and value.is_reshape:
        value = value.reads[0].value
    return value


def is_inlined(value: Value) -> bool:
    """Whether every reader computes `value` anew: views and values that read nothing."""
    if isinstance(value, Constant):
        return True
    return isinstance(value, Pointwise) and (value.is_view or not value.reads)


def effective_reads(value: Value, cache: dict[int, list[Read]]) -> list[Read]:
    """What `value` reads, looking through inlined values."""
    known = cache.get(id(value))
    if known is not None:
        return known
    reads: dict[int, Read] = {}
    for read in value.reads:
        inner = [read]
        if is_inlined(read.value):
            inner = [
                Read(r.value, _compose(read.place, r.place))
                for r in effective_reads(read.value, cache)
            ]
        for r in inner:
            known_read = reads.get(id(r.value))
            if known_read is None or known_read.place != r.place:
                worst = r if known_read is None else Read(r.value, "other")
                reads[id(r.value)] = worst
    cache[id(value)] = list(reads.values())
    return cache[id(value)]


def _compose(
    outer: Literal["same", "broadcast", "flat", "other"],
    inner: Literal["same", "broadcast", "flat", "other"],
) -> Literal["same", "broadcast", "flat", "other"]:
    if outer == "same":
        return inner
    if inner == "same":
        return outer
    return "flat" if outer == inner == "flat" else "other"


class Grouping:
    """Builds the groups of one program, then decides which values get memory.

    `place` and `demand` assign values to groups as the program is read; `finish` decides, once,
    what each group stores and reads. Kernels, library calls and opaque kernels are numbered units.
    """

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.group_of: dict[int, Group] = {}
        self.units = UnitOrder()
        self._read_cache: dict[int, list[Read]] = {}
        self._unit_of: dict[int, int] = {}
        self._demanded: dict[int, Value] = {}
        # What library calls and hand-written kernels read and make.
        self.read_by_unit: dict[int, list[Value]] = {}
        self.made_by_unit: dict[int, list[Value]] = {}
        # The groups that read a value, by its id; a group that was absorbed leads to the other one.
        self._readers_of: dict[int, set[int]] = {}
        self._by_number: dict[int, Group] = {}

    def add_unit(self, arguments: Iterable[Value]) -> int:
        """A library call or opaque kernel that reads `arguments` from memory; its unit number."""
        owners = [self.demand(value) for value in arguments]
        unit = self.units.add(self._units_read(owners))
        self.read_by_unit[unit] = owners
        return unit

    def produced_by(self, value: Value, unit: int) -> None:
        """Note that `value` (a Buffer or Opaque) comes out of a unit."""
        self._unit_of[id(value)] = unit
        self.made_by_unit.setdefault(unit, []).append(value)

    def unit_of(self, value: Value) -> int | None:
        """The library call or opaque kernel that `value` comes out of, if any."""
        return self._unit_of.get(id(value))

    def reads(self, value: Value) -> list[Read]:
        """What `value` reads from memory or from other members, looking through views."""
        return effective_reads(value, self._read_cache)

    def demand(self, value: Value) -> Value:
        """Ask for `value` in memory; returns the value that owns the memory."""
        owner = storage_of(value)
        if isinstance(owner, (Pointwise, Reduction)):
            self.place(owner)
            self._demanded[id(owner)] = owner
        return owner

    def place(self, value: Value) -> None:
        """Give `value`, and all that it needs, a group."""
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
        siblings = self._siblings(value, reads) if isinstance(value, Reduction) else []
        for group in [*candidates, *siblings]:
            fitted = fit(value, reads, group)
            if fitted is not None and self._can_join(reads, group):
                self._enter(value, group, *fitted)
                before = self._units_read(read.value for read in reads)
                self.units.add_before(group.number, before - {group.number})
                for other in candidates:
                    if other is not group:
                        self._absorb(other, group)
                return
        unit = self.units.add(self._units_read(read.value for read in reads))
        group = Group(unit, own_domain(value))
        self.groups.append(group)
        self._by_number[unit] = group
        self._enter(value, group, group.domain, own_placement(value))

    def _candidates(self, reads: list[Read]) -> list[Group]:
        """The groups that compute an argument, latest first."""
        groups: dict[int, Group] = {}
        for read in reads:
            group = self.group_of.get(id(read.value))
            if group is not None:
                groups[group.number] = group
        return [groups[number] for number in sorted(groups, reverse=True)]

    def _siblings(self, value: Reduction, reads: list[Read]) -> list[Group]:
        """The groups that read all of a tensor in memory that `value` reduces, latest first.

        Only for reductions: their results are small, so nothing large has to wait in memory for a
        reader because it was computed early.
        """
        size = math.prod(value.source_shape)
        groups: dict[int, Group] = {}
        for read in reads:
            if read.value.size == size and id(read.value) not in self.group_of:
                for number in self._readers_of.get(id(read.value), ()):
                    group = self._by_number[number]
                    if _gates(group) == value.is_gate:
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

    def _absorb(self, small: Group, into: Group) -> None:
        """Move a group of arithmetic into another that reads it, where the loops agree."""
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
        """Whether no argument waits for a unit that itself waits for the group."""
        for read in reads:
            unit = self._unit_of.get(id(read.value))
            if unit is not None and unit != group.number and self.units.waits(unit, group.number):
                return False
        return True

    def _units_read(self, values: Iterable[Value]) -> set[int]:
        """The units that make `values`."""
        units = (self._unit_of.get(id(value)) for value in values)
        return {unit for unit in units if unit is not None}

    # After the last value: what is stored.

    def finish(self) -> list[Group]:
        """Decide what each group stores and reads; nothing joins a group afterwards.

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
        """Members of other groups that computing `value` in `group` reads; notes the inputs."""
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
        """Let readers in other kernels compute cheap values anew instead of storing them.

        A value is cheap when it reads at most one tensor of its own size, which lies in memory
        anyway and is not wider: reading that instead of the value saves the value's write. A
        scalar's write is nothing, and its readers would compute it once for each element.
        """
        outside = self._values_read_outside()
        for value in sorted(outside.values(), key=lambda value: -value.serial):
            if id(value) in self._demanded or not isinstance(value, Pointwise):
                continue
            if value.size > 1 and self._is_cheap(value, outside):
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
        large = 0
        for read in self.reads(value):
            owner = read.value
            in_memory = id(owner) in outside or id(owner) in self._demanded
            if id(owner) in self.group_of and not in_memory:
                return False
            if owner.size * 8 > value.size:
                large += 1
                if read.place not in ("same", "flat") or _nbytes(owner) > _nbytes(value):
                    return False
        return large <= 1


def _gates(group: Group) -> bool:
    """Whether a kernel only makes scalars that readers of its arguments wait for."""
    gates = [one for one in group.members if isinstance(one, Reduction) and one.is_gate]
    return bool(gates) and all(one.size == 1 for one in group.members)


def _nbytes(value: Value) -> int:
    return value.size * dtype_nbytes(value.dtype)


class UnitOrder:
    """Which unit must run before which, as bit sets that stay transitively closed.

    A unit knows those that read it, not those that come later because of them: what is new before
    it is handed on from reader to reader, as far as it is new there.
    """

    def __init__(self) -> None:
        self.ancestors: list[int] = []
        self._readers: list[set[int]] = []

    def add(self, before: set[int]) -> int:
        """A new unit that runs after the units `before` and all that these wait for."""
        unit = len(self.ancestors)
        self.ancestors.append(0)
        self._readers.append(set())
        self.add_before(unit, before)
        return unit

    def add_before(self, unit: int, before: set[int]) -> None:
        """Let `unit` also run after those in `before`."""
        behind = 0
        for one in before:
            behind |= (1 << one) | self.ancestors[one]
            self._readers[one].add(unit)
        self._hand_on(unit, behind)

    def _hand_on(self, unit: int, behind: int) -> None:
        waiting = [unit]
        while waiting:
            top = waiting.pop()
            if behind & ~self.ancestors[top]:
                self.ancestors[top] |= behind
                waiting += self._readers[top]

    def waits(self, unit: int, other: int) -> bool:
        """Whether `unit` runs after `other`."""
        return bool(self.ancestors[unit] >> other & 1)

    def can_merge(self, a: int, b: int) -> bool:
        """Whether one unit can do the work of both: no third one stands between them."""
        return not self._stands_between(a, b) and not self._stands_between(b, a)

    def _stands_between(self, first: int, last: int) -> bool:
        between = self.ancestors[last] & ~self.ancestors[first] & ~(1 << first)
        return any(self.waits(unit, first) for unit in bits_of(between))

    def merge(self, gone: int, into: int) -> None:
        """Let `into` take the place of `gone`."""
        readers = self._readers[gone] - {into}
        # What turns out to come before `gone` later comes before `into`.
        self._readers[gone].add(into)
        self._hand_on(into, self.ancestors[gone] & ~(1 << into))
        for reader in readers:
            self.add_before(reader, {into})
        self.ancestors[into] &= ~(1 << gone)


def bits_of(bits: int) -> Iterator[int]:
    """Positions of the ones in a bit set."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def own_placement(value: Value) -> Placement:
    """What `value` is in a group that it opens."""
    if not isinstance(value, Reduction):
        return "full"
    return "column" if column_domain(value) is not None else "row"


def own_domain(value: Value) -> Domain:
    """The loops that `value` has when it opens a group."""
    if isinstance(value, Reduction):
        return column_domain(value) or Domain(value.source_shape, value.axes)
    return Domain(value.shape, None)


def column_domain(value: Reduction) -> Domain | None:
    """The domain in which `value` reduces whole rows into one: it keeps just the last dimensions.

    None where it keeps others, or nothing, or where it reduces a single row.
    """
    kept = tuple(d for d in range(len(value.source_shape)) if d not in value.axes)
    domain = Domain(value.source_shape, kept)
    if domain.columns <= 1 or domain.rows <= 1 or not domain.is_trailing:
        return None
    return domain


def fit(value: Value, reads: list[Read], group: Group) -> tuple[Domain, Placement] | None:
    """The domain `group` would have with `value` in it, and as what; None if it does not fit."""
    if len(group.members) >= MAX_MEMBERS or _buffer_count(reads, group) > MAX_BUFFERS:
        return None
    columns = {id(member) for member in group.column}
    if any(id(read.value) in columns for read in reads):
        return None
    if isinstance(value, Reduction):
        return _fit_reduction(value, reads, group)
    return _fit_pointwise(value, reads, group)


def _buffer_count(reads: list[Read], group: Group) -> int:
    members = {id(value) for value in group.members}
    return len((group.read_ids | {id(read.value) for read in reads}) - members)


def _fit_reduction(
    value: Reduction, reads: list[Read], group: Group
) -> tuple[Domain, Placement] | None:
    placement = own_placement(value)
    domain = merge_domains(group, own_domain(value))
    if domain is None:
        return None
    rows = {id(member) for member in group.row}
    if domain.keeps_innermost and any(id(read.value) in rows for read in reads):
        return None
    for read in reads:
        if id(read.value) in rows:
            if not _lines_up_with_rows(read, domain, value.source_shape):
                return None
        elif any(read.value is member for member in group.full):
            if not _same_elements(read, value.source_shape):
                return None
    return domain, placement


def merge_domains(group: Group, wanted: Domain) -> Domain | None:
    """The one domain in which both the group's members and a reduction over `wanted` can run."""
    have = group.domain
    if have.size != wanted.size:
        return None
    if have.axes is None:
        if wanted.is_trailing or all(member.shape == wanted.shape for member in group.full):
            return wanted
        return None
    if have.is_trailing and wanted.is_trailing:
        return have if have.columns == wanted.columns else None
    return have if (have.shape, have.axes) == (wanted.shape, wanted.axes) else None


def _same_elements(read: Read, reader_shape: tuple[int, ...]) -> bool:
    if read.place in ("same", "flat"):
        return True
    # A reduction's body reads a value of its source shape at its own index.
    return read.place == "broadcast" and read.value.shape == reader_shape


def _lines_up_with_rows(read: Read, domain: Domain, reader_shape: tuple[int, ...]) -> bool:
    """Whether reading a ROW value at the reader's index gives the value of the same row."""
    if read.place not in ("broadcast", "same"):
        return False
    shape = read.value.shape
    if len(shape) != len(reader_shape):
        return False
    if any(n not in (1, m) for n, m in zip(shape, reader_shape, strict=True)):
        return False
    dropped = tuple(d for d, n in enumerate(shape) if n == 1 and reader_shape[d] > 1)
    if domain.is_trailing:
        inner = Domain(reader_shape, dropped)
        return inner.is_trailing and inner.columns == domain.columns
    columns = tuple(d for d in domain.axes or () if domain.shape[d] > 1)
    return reader_shape == domain.shape and dropped == columns


def _fit_pointwise(
    value: Value, reads: list[Read], group: Group
) -> tuple[Domain, Placement] | None:
    domain = group.domain
    if value.size == domain.size and _fits_as_full(value, reads, group):
        return domain, "full"
    if group.row and value.size == domain.rows and _fits_as_row(value, reads, group):
        return domain, "row"
    return None


def _fits_as_full(value: Value, reads: list[Read], group: Group) -> bool:
    domain = group.domain
    if not domain.is_trailing and value.shape != domain.shape:
        # Another shape's index would cost divisions; at the same flat position none is needed.
        return all(read.place in ("same", "flat") for read in reads)
    rows = {id(member) for member in group.row}
    members = {id(member) for member in group.full}
    for read in reads:
        if id(read.value) in rows:
            if domain.keeps_innermost or not _lines_up_with_rows(read, domain, value.shape):
                return False
        elif id(read.value) in members and read.place not in ("same", "flat"):
            return False
    return True


def _fits_as_row(value: Value, reads: list[Read], group: Group) -> bool:
    if group.domain.keeps_innermost:
        return False
    rows = {id(member) for member in group.row}
    members = {id(member) for member in group.full}
    for read in reads:
        if id(read.value) in members:
            return False
        if id(read.value) in rows and read.place not in ("same", "flat"):
            return False
    return True
