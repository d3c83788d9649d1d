# SPDX-License-Identifier: Apache-2.0
"""Ops that depend on memory layout, expressed by the elements that they read.

A decomposition may give its result another layout than the kernel that it replaces, so that a
view of the user's tensor need not be a view of the captured value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

aten = torch.ops.aten


def is_viewable(x: torch.Tensor, size: Sequence[int]) -> bool:
    """Return whether `x.view(size)` needs no copy; one extent of `size` may be -1.

    Axes that are contiguous with each other form one run, and no new axis may cross the ends of a
    run.
    """
    if not x.numel() or x.is_contiguous():
        return True
    axes = [(n, step) for n, step in zip(x.shape, x.stride(), strict=True) if n != 1]
    ends, elements = set(), 1
    for (extent, step), (inner_extent, inner_step) in itertools.pairwise(axes):
        elements *= extent
        if step != inner_extent * inner_step:
            ends.add(elements)
    known = math.prod(extent for extent in size if extent != -1)
    extents = [extent if extent != -1 else x.numel() // known for extent in size]
    return ends <= set(itertools.accumulate(extents, lambda a, b: a * b))


def view(x: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Decompose `aten.view`: copy where the layout allows no view."""
    if is_viewable(x, size):
        return NotImplemented
    copy = x.clone(memory_format=torch.contiguous_format)
    result: torch.Tensor = aten._unsafe_view.default(copy, size)
    return result


def strided(
    x: torch.Tensor,
    layout: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> torch.Tensor | None:
    """Return `as_strided(x, size, stride, storage_offset)` by views of `x`, stored as `layout`.

    `layout` has the shape of `x`, and the strides that `x` had when the step was run. None where
    the result is not all the elements of `x`, each once.
    """
    order = _order_in_memory(layout.shape, layout.stride())
    new_order = _order_in_memory(size, stride)
    if order is None or new_order is None or math.prod(size) != x.numel():
        return None
    if storage_offset not in (None, layout.storage_offset()):
        return None
    flat = x.permute(order).reshape(-1)
    sorted_axes = flat.view([size[axis] for axis in new_order])
    return sorted_axes.permute([new_order.index(axis) for axis in range(len(size))])


def window(
    x: torch.Tensor,
    layout: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> torch.Tensor | None:
    """Return a copy of `as_strided(x, ...)`, as `strided` has it; None outside of `x`'s elements.

    Windows may overlap, or leave elements out.
    """
    order = _order_in_memory(layout.shape, layout.stride())
    places = _places(layout, size, stride, storage_offset)
    if order is None or places is None:
        return None
    return x.permute(order).reshape(-1)[places]


def write_window(
    x: torch.Tensor,
    layout: torch.Tensor,
    part: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> None:
    """Write `part` to where `as_strided(x, ...)` is, by indices that do not depend on the layout.

    `has_window` said that it can.
    """
    places = _places(layout, size, stride, storage_offset)
    assert places is not None
    axes: list[torch.Tensor | None] = [
        places // step % extent if extent != 1 else torch.zeros_like(places)
        for extent, step in zip(layout.shape, layout.stride(), strict=True)
    ]
    x.index_put_(axes, part) if axes else x.copy_(part.reshape(()))


def has_window(
    layout: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> bool:
    """Return whether `window` and `write_window` take a geometry: each element at most once."""
    if _order_in_memory(layout.shape, layout.stride()) is None:
        return False
    reach = 0
    for step, n in sorted((step, n) for n, step in zip(size, stride, strict=True) if n != 1):
        if step <= reach:
            return False
        reach += step * (n - 1)
    return _begin_inside(layout, size, stride, storage_offset) is not None


def _places(
    layout: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None
) -> torch.Tensor | None:
    """Return where each element of `as_strided` is, counted in memory from the first of `layout`.

    None where it has no elements, or is not inside of those of `layout`.
    """
    begin = _begin_inside(layout, size, stride, storage_offset)
    if begin is None:
        return None
    places = torch.full((), begin, dtype=torch.int64, device=layout.device)
    for axis, (n, step) in enumerate(zip(size, stride, strict=True)):
        along = torch.arange(n, device=layout.device) * step
        places = places + along.view([-1] + [1] * (len(size) - 1 - axis))
    return places


def _begin_inside(
    layout: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None
) -> int | None:
    begin = 0 if storage_offset is None else int(storage_offset - layout.storage_offset())
    last = begin + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return None if 0 in size or begin < 0 or last >= layout.numel() else begin


def _order_in_memory(shape: Sequence[int], stride: Sequence[int]) -> list[int] | None:
    """Return the axes from the outermost to the innermost; None where they have gaps or overlap."""
    order = sorted(range(len(shape)), key=lambda axis: (-stride[axis], shape[axis] == 1))
    long = [axis for axis in order if shape[axis] != 1]
    expected = 1
    for axis in reversed(long):
        if stride[axis] != expected:
            return None
        expected *= shape[axis]
    return [axis for axis in order if shape[axis] == 1] + long
