# SPDX-License-Identifier: Apache-2.0
"""Reading and writing elements at computed positions.

Indices are int32 or int64. Negative ones count from the end, where PyTorch's op allows it
(`wraps`; `scatter_add` counts from 0). `rewrites/check_indices.py` checks for indices out of range
and refuses or rolls back the step; the kernels clamp them, so that no access is out of bounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from amp_ir.dialect.define import Shape, Tensor, define
from amp_ir.errors import ArgumentError, OptionError


def indexed_shape(x: Shape, ids: tuple[Shape, ...], axes: Shape) -> tuple[Shape, Shape, int]:
    """Return the shapes of indexing `axes` of a tensor `x` by tensors of shapes `ids`, as in NumPy.

    Returns (shape of the result, broadcast shape of the indices, the axis where that is):
    the position of the first indexed axis when they are neighbours, else the front.
    """
    together = tuple(np.broadcast_shapes(*ids))
    place = axes[0] if axes == tuple(range(axes[0], axes[0] + len(axes))) else 0
    kept = [extent for axis, extent in enumerate(x) if axis not in axes]
    return (*kept[:place], *together, *kept[place:]), together, place


def _check(op: str, x: Tensor, ids: tuple[Tensor, ...], axes: Shape) -> Shape:
    for one in ids:
        one.expect_index()
    ascending = list(axes) == sorted(set(axes)) and all(0 <= axis < x.ndim for axis in axes)
    if not ids or len(axes) != len(ids) or not ascending:
        raise OptionError(
            f"{op}: option axes is {tuple(axes)} for {len(ids)} index tensors and {x.label} of "
            f"shape {x.shape}, expected one axis for each index tensor, ascending, counted from 0"
        )
    try:
        return indexed_shape(x.shape, tuple(one.shape for one in ids), tuple(axes))[0]
    except ValueError:
        shapes = ", ".join(str(one.shape) for one in ids)
        raise ArgumentError(f"{op}: index tensors of shapes {shapes} do not broadcast") from None


def _places(x: torch.Tensor, ids: tuple[torch.Tensor, ...], axes: Shape) -> list[Any]:
    """Return `ids` as PyTorch's indices, with full slices for the axes that are not indexed."""
    places: list[Any] = [slice(None)] * x.ndim
    for axis, one in zip(axes, ids, strict=True):
        places[axis] = one.long()
    return places


def _index(x: torch.Tensor, *ids: torch.Tensor, axes: Shape, wraps: bool) -> torch.Tensor:
    return x[tuple(_places(x, ids, axes))]


@define("amp_ir.index", "x", "ids...", reference=_index)
def index(x: Tensor, *ids: Tensor, axes: Shape, wraps: bool = True) -> Tensor:
    """Return x[..., ids, ...] as in NumPy: x any[...], ids int[...] that broadcast -> any[...].

    `axes[k]` is the axis that `ids[k]` indexes; ascending. The broadcast shape of the indices
    is at the first indexed axis when these are neighbours, else in front. Without `wraps` a
    negative index is out of range, as it is for `index_select`.
    """
    return x.with_shape(_check("amp_ir.index", x, ids, axes))


def _index_put(
    x: torch.Tensor,
    values: torch.Tensor,
    *ids: torch.Tensor,
    axes: Shape,
    accumulate: bool,
    wraps: bool,
) -> torch.Tensor:
    places = [None if isinstance(place, slice) else place for place in _places(x, ids, axes)]
    return torch.ops.aten.index_put(x, places, values.to(x.dtype), accumulate)


@define("amp_ir.index_put", "x", "values", "ids...", reference=_index_put)
def index_put(
    x: Tensor,
    values: Tensor,
    *ids: Tensor,
    axes: Shape,
    accumulate: bool = False,
    wraps: bool = True,
) -> Tensor:
    """Copy x with x[..., ids, ...] replaced by values, or values added to it.

    values any[...] broadcasts to the shape that `index` with the same options gives. Duplicates:
    with `accumulate` all are added, in float32 and in order; without, the last one stays. Without
    `wraps` a negative index is out of range, as it is for `index_copy`.
    """
    shape = _check("amp_ir.index_put", x, ids, axes)
    values.expect_dtype(x.dtype)
    values.expect_broadcastable(shape)
    return x.with_shape(x.shape)


def _scatter_add(
    x: torch.Tensor, ids: torch.Tensor, src: torch.Tensor, *, axis: int
) -> torch.Tensor:
    within = src[tuple(slice(0, extent) for extent in ids.shape)]
    return x.scatter_add(axis, ids.long(), within)


@define("amp_ir.scatter_add", "x", "ids", "src", reference=_scatter_add)
def scatter_add(x: Tensor, ids: Tensor, src: Tensor, *, axis: int) -> Tensor:
    """Copy x with src[i...] added at x[i..., ids[i...] on `axis`, ...].

    x any[...], ids int[...] with no extent larger than src's, nor (off `axis`) than x's, src
    any[...] -> like x. Floats are added in float32 and in order, so the result is deterministic.
    """
    ids.expect_index()
    src.expect_dtype(x.dtype)
    axis = x.axis(axis)
    for other in (ids, src):
        if other.ndim != x.ndim:
            other.refuse("shape", f"{x.ndim} axes, as {x.label} of shape {x.shape}")
    for k, extent in enumerate(ids.shape):
        if extent > src.shape[k] or (k != axis and extent > x.shape[k]):
            ids.refuse("shape", f"extents within src {src.shape} and, off the axis, x {x.shape}")
    return x.with_shape(x.shape)
