# SPDX-License-Identifier: Apache-2.0
"""Fusion legality: whether a value can be computed in the loops of a group, and as what."""

from __future__ import annotations

from amp_ir.loops.group import Domain, Group, Placement
from amp_ir.loops.ir import Read, Reduction, Value

MAX_MEMBERS = 48
MAX_BUFFERS = 24


def own_placement(value: Value) -> Placement:
    """Return the placement of `value` in a group that it opens."""
    if not isinstance(value, Reduction):
        return "full"
    return "column" if column_domain(value) is not None else "row"


def own_domain(value: Value) -> Domain:
    """Return the loops that `value` has when it opens a group."""
    if isinstance(value, Reduction):
        return column_domain(value) or Domain(value.source_shape, value.axes)
    return Domain(value.shape, None)


def column_domain(value: Reduction) -> Domain | None:
    """Return the domain in which `value` reduces whole rows into one: it keeps the last dimensions.

    None where it keeps others, or nothing, or where it reduces a single row.
    """
    kept = tuple(d for d in range(len(value.source_shape)) if d not in value.axes)
    domain = Domain(value.source_shape, kept)
    if domain.columns <= 1 or domain.rows <= 1 or not domain.is_trailing:
        return None
    return domain


def fit(value: Value, reads: list[Read], group: Group) -> tuple[Domain, Placement] | None:
    """Return the domain of `group` with `value` in it, and its placement; None if not legal."""
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
    """Return the one domain for both the group's members and a reduction over `wanted`."""
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
    """Return whether reading a ROW value at the reader's index gives the value of the same row."""
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
