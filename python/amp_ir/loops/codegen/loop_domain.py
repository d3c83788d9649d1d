# SPDX-License-Identifier: Apache-2.0
"""Rows and columns of a pointwise kernel, whose domain no reduction has fixed."""

from __future__ import annotations

import math

from amp_ir.ir.vector_instructions import LANES
from amp_ir.loops.group import Domain, Group, effective_reads
from amp_ir.loops.ir import Read


def loop_domain(group: Group) -> Domain:
    """Return the group's domain with fixed columns; without a reduction, choose them here."""
    domain = group.domain
    if domain.axes is not None:
        return domain
    shape = domain.shape
    uniform = _uniform_tail(group)
    columns = math.prod(shape[uniform:])
    if uniform == 0:
        return _chunked(domain.size)
    if len({v.shape for v in group.full}) > 1 or columns > 65536:
        uniform, columns = len(shape) - 1, shape[-1]
    if columns == 1:
        # A row of one element would make the rows the innermost loop.
        return _chunked(domain.size)
    return Domain((domain.size // columns, columns), (1,))


def _chunked(size: int) -> Domain:
    """Cut a flat space into rows of a few thousand elements."""
    for columns in (4096, 2048, 1024, 512, 256):
        if size % columns == 0:
            return Domain((size // columns, columns), (1,))
    return Domain((1, size), (1,))


def _uniform_tail(group: Group) -> int:
    """Return the first dimension from which on every member reads all its arguments the same way.

    0 when all reads are at the element's own position: then any cut of the flat space is valid.
    """
    shape = group.domain.shape
    first = 0
    members = {id(value) for value in group.full}
    cache: dict[int, list[Read]] = {}
    for value in group.full:
        # Short rows fill no vector: there, what is read through a view has its index divided.
        seen = effective_reads(value, cache) if value.shape[-1:] >= (LANES,) else value.reads
        for read in seen:
            if id(read.value) in members or read.place in ("same", "flat"):
                continue
            if read.value.size == 1:
                continue
            if read.place != "broadcast" or value.shape != shape:
                return max(len(shape) - 1, 0) if len(shape) > 1 else 0
            first = max(first, _varying_tail(read.value.shape, shape))
    return first


def _varying_tail(read_shape: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Return the first of the trailing dimensions that are either all read or all not read."""
    padded = (1,) * (len(shape) - len(read_shape)) + read_shape
    first = len(shape) - 1
    is_read = padded[first] > 1
    while first > 0 and (padded[first - 1] > 1) == is_read:
        first -= 1
    return first
