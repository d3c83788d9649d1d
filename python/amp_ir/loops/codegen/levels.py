# SPDX-License-Identifier: Apache-2.0
"""The passes over a row that a kernel makes, and which of its outputs may overwrite an input."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import attrs

from amp_ir.ir.tensor_layout import dtype_nbytes
from amp_ir.loops.group import Group, effective_reads
from amp_ir.loops.ir import Pointwise, Read, Reduction, Value


@attrs.define
class Level:
    """The work of one pass over the columns of a row: row values first, then the pass."""

    row_values: list[Value] = attrs.field(factory=list)
    stores: list[Value] = attrs.field(factory=list)
    reductions: list[Reduction] = attrs.field(factory=list)
    columns: list[Reduction] = attrs.field(factory=list)


def assign_levels(group: Group) -> list[Level]:
    """Assign each value to a pass over the row: a reader of a reduction runs one level later."""
    level_of = _levels_of(group)
    rows = [value for value in group.row if isinstance(value, Reduction)]
    last = max([*level_of.values(), *(level_of[id(value)] + 1 for value in rows)])
    levels = [Level() for _ in range(last + 1)]
    stored = {id(value) for value in group.stored}
    for value in group.row:
        level = level_of[id(value)]
        if not isinstance(value, Reduction):
            levels[level].row_values.append(value)
            continue
        levels[level].reductions.append(value)
        if id(value) in stored and not group.domain.keeps_innermost:
            levels[level + 1].row_values.append(value)
    for value in group.column:
        assert isinstance(value, Reduction)
        levels[level_of[id(value)]].columns.append(value)
    for value in group.full:
        if id(value) in stored:
            levels[level_of[id(value)]].stores.append(value)
    return levels


def _levels_of(group: Group) -> dict[int, int]:
    members = {id(value) for value in group.members}
    level_of: dict[int, int] = {}

    cache: dict[int, list[Read]] = {}

    def level(value: Value) -> int:
        known = level_of.get(id(value))
        if known is not None:
            return known
        deepest = 0
        for read in effective_reads(value, cache):
            if id(read.value) in members:
                step = 1 if isinstance(read.value, Reduction) else 0
                deepest = max(deepest, level(read.value) + step)
        level_of[id(value)] = deepest
        return deepest

    for value in group.members:
        level(value)
    return level_of


def inplace_pairs(group: Group, inputs: list[Value]) -> list[tuple[int, int]]:
    """Return the (output, input) positions that may share memory.

    An output element is written after the input element at the same position has been read for the
    last time: all reads of the input are at the element's own position, and in no later level. A
    ROW value is written once per row; it may overwrite an input that it alone reads, such as the
    running statistics that a batch normalization updates.
    """
    levels = assign_levels(group)
    level_of = {id(value): k for k, level in enumerate(levels) for value in level.stores}
    pairs = []
    cache: dict[int, list[Read]] = {}
    last_of: dict[int, float] = {}
    for o, output in enumerate(group.stored):
        for i, source in enumerate(inputs):
            if source.size != output.size:
                continue
            if dtype_nbytes(source.dtype) != dtype_nbytes(output.dtype):
                continue
            if id(output) not in level_of:
                if _is_own_row(group, output, source):
                    pairs.append((o, i))
                continue
            if i not in last_of:
                last_of[i] = _last_read_level(group, levels, source, cache)
            if last_of[i] <= level_of[id(output)]:
                pairs.append((o, i))
    return pairs


def _is_own_row(group: Group, output: Value, source: Value) -> bool:
    """Return whether `output`, a ROW value and no sum, alone reads `source`, at its own index.

    Nor may anything read `output` itself: on a GPU every thread of a row computes it, some of them
    after it has been written, and their result must not matter.
    """
    if isinstance(output, Reduction) or not any(output is value for value in group.row):
        return False
    cache: dict[int, list[Read]] = {}
    for value in group.members:
        for read in effective_reads(value, cache):
            is_own = value is output and read.place in ("same", "flat")
            if read.value is output or (read.value is source and not is_own):
                return False
    return True


def _last_read_level(
    group: Group, levels: list[Level], source: Value, cache: dict[int, list[Read]]
) -> float:
    """Return the last level that reads `source` element by element; infinite if read elsewhere."""
    last = 0.0
    for k, level in enumerate(levels):
        places = _places_read(
            group, [*level.stores, *level.reductions, *level.columns], source, cache
        )
        if places - {"same", "flat"}:
            return math.inf
        if places:
            last = k
    arithmetic = [value for value in group.row if not isinstance(value, Reduction)]
    is_read_by_row = any(
        read.value is source for value in arithmetic for read in effective_reads(value, cache)
    )
    return math.inf if is_read_by_row else last


def _places_read(
    group: Group, values: list[Value], source: Value, cache: dict[int, list[Read]]
) -> set[str]:
    """Return the places at which `values`, and the FULL members they need, read `source`."""
    reads = _reads_of_pass(group, values, cache)
    return {read.place for read in reads if read.value is source}


def _reads_of_pass(
    group: Group, values: list[Value], cache: dict[int, list[Read]]
) -> Iterator[Read]:
    """Yield all reads of `values` and of the FULL members that they need."""
    full = {id(value) for value in group.full}
    stack, seen = list(values), set()
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        for read in effective_reads(value, cache):
            yield read
            if id(read.value) in full:
                stack.append(read.value)


def held_values(group: Group, levels: list[Level]) -> list[Value]:
    """Return the FULL values that are computed once, since several passes need them.

    These are marked for their arithmetic, or read what a vector gathers element by element.
    """
    cache: dict[int, list[Read]] = {}
    passes: Counter[int] = Counter()
    for level in levels:
        values = [*level.stores, *level.reductions, *level.columns]
        reads = _reads_of_pass(group, values, cache)
        passes.update({id(value) for value in (*values, *(read.value for read in reads))})
    several = [one for one in group.full if isinstance(one, Pointwise) and passes[id(one)] > 1]
    return [
        one
        for one in several
        if one.is_held or any(read.is_scattered for read in effective_reads(one, cache))
    ]
