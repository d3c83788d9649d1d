# SPDX-License-Identifier: Apache-2.0
"""Slices, selections and writes to them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from tvm import relax

from amp_ir.importer.converters.creation import static_indices
from amp_ir.importer.converters.emitter import Emitter
from amp_ir.importer.converters.promotion import dtype_of, shape_of
from amp_ir.importer.converters.registry import converts

aten = torch.ops.aten


@converts(aten.slice.Tensor)
def slice_(
    ops: Emitter,
    x: relax.Expr,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> relax.Expr:
    """Return every `step`-th element of one axis."""
    axis = dim % len(shape_of(x))
    begin, stop, _ = slice(start, end).indices(shape_of(x)[axis])
    return ops.slice(x, axis, begin, max(begin, stop), step=step)


@converts(aten.select.int)
def select(ops: Emitter, x: relax.Expr, dim: int, index: int) -> relax.Expr:
    """Return one position of an axis, which is dropped."""
    axis = dim % len(shape_of(x))
    begin = index % shape_of(x)[axis]
    return ops.reshape(ops.slice(x, axis, begin, begin + 1), ops.shape)


@converts(aten.slice_scatter.default)
def slice_scatter(
    ops: Emitter,
    x: relax.Expr,
    source: relax.Expr,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> relax.Expr:
    """Return x with the elements of one slice replaced."""
    axis = dim % len(shape_of(x))
    extent = shape_of(x)[axis]
    begin, stop, _ = slice(start, end).indices(extent)
    source = ops.cast(source, dtype_of(x))
    if step == 1:
        rest = ops.slice(x, axis, stop, extent)
        return ops.concat([ops.slice(x, axis, 0, begin), source, rest], axis)
    position = _positions(x)
    order = position.movedim(axis, 0)[begin:stop:step].movedim(0, axis)
    return _overwritten(ops, x, source, order)


@converts(aten.slice_backward.default)
def slice_backward(
    ops: Emitter,
    grad: relax.Expr,
    sizes: Sequence[int],
    dim: int,
    start: int,
    end: int,
    step: int,
) -> relax.Expr:
    """Return zeros with the gradient in the slice that the forward op read."""
    zeros = ops.full(sizes, 0, dtype_of(grad))
    result: relax.Expr = slice_scatter(ops, zeros, grad, dim, start, end, step)
    return result


@converts(aten.select_scatter.default)
def select_scatter(
    ops: Emitter, x: relax.Expr, source: relax.Expr, dim: int, index: int
) -> relax.Expr:
    """Return x with one position of an axis replaced."""
    shape = list(shape_of(x))
    axis = dim % len(shape)
    position = index % shape[axis]
    shape[axis] = 1
    source = ops.reshape(source, shape)
    result: relax.Expr = slice_scatter(ops, x, source, axis, position, position + 1)
    return result


@converts(aten.select_backward.default)
def select_backward(
    ops: Emitter, grad: relax.Expr, sizes: Sequence[int], dim: int, index: int
) -> relax.Expr:
    """Return zeros with the gradient at the position that the forward op read."""
    zeros = ops.full(sizes, 0, dtype_of(grad))
    result: relax.Expr = select_scatter(ops, zeros, grad, dim, index)
    return result


@converts(aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default)
def split_with_sizes(
    ops: Emitter, x: relax.Expr, sizes: Sequence[int], dim: int = 0
) -> tuple[relax.Expr, ...]:
    """Return consecutive pieces of one axis."""
    axis = dim % len(shape_of(x))
    ends = list(itertools.accumulate(sizes))
    return tuple(ops.slice(x, axis, end - size, end) for size, end in zip(sizes, ends, strict=True))


@converts(aten.split.Tensor, aten.unsafe_split.Tensor, aten.unsafe_chunk.default)
def split(ops: Emitter, x: relax.Expr, _size: int, dim: int = 0) -> tuple[relax.Expr, ...]:
    """Split into pieces of equal extent; the last may be shorter."""
    axis = dim % len(shape_of(x))
    sizes = [piece.shape[axis] for piece in ops.result]
    result: tuple[relax.Expr, ...] = split_with_sizes(ops, x, sizes, dim)
    return result


@converts(aten.unbind.int)
def unbind(ops: Emitter, x: relax.Expr, dim: int = 0) -> tuple[relax.Expr, ...]:
    """Return every position of one axis."""
    axis = dim % len(shape_of(x))
    return tuple(
        ops.reshape(ops.slice(x, axis, position, position + 1), one.shape)
        for position, one in enumerate(ops.result)
    )


@converts(aten.diagonal.default)
def diagonal(
    ops: Emitter, x: relax.Expr, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> relax.Expr:
    """Return one diagonal of two axes, as the last axis."""
    return _view(ops, x, _positions(x).diagonal(offset, dim1, dim2))


@converts(aten.unfold.default)
def unfold(ops: Emitter, x: relax.Expr, dim: int, size: int, step: int) -> relax.Expr:
    """Return windows of one axis, as a new last axis."""
    return _view(ops, x, _positions(x).unfold(dim, size, step))


def _positions(x: relax.Expr) -> torch.Tensor:
    return torch.arange(math.prod(shape_of(x))).reshape(shape_of(x))


def _view(ops: Emitter, x: relax.Expr, positions: torch.Tensor) -> relax.Expr:
    """Return the elements of x at row-major `positions`, in their shape."""
    flat = ops.reshape(x, [math.prod(shape_of(x))])
    taken = ops.emit(relax.op.take(flat, static_indices(ops, positions.reshape(-1)), 0))
    return ops.reshape(taken, ops.shape)


@converts(aten.diagonal_scatter.default)
def diagonal_scatter(
    ops: Emitter,
    x: relax.Expr,
    source: relax.Expr,
    offset: int = 0,
    dim1: int = 0,
    dim2: int = 1,
) -> relax.Expr:
    """Return x with one diagonal of two axes replaced."""
    return _overwritten(ops, x, source, _positions(x).diagonal(offset, dim1, dim2))


def _overwritten(
    ops: Emitter, x: relax.Expr, source: relax.Expr, positions: torch.Tensor
) -> relax.Expr:
    """Return x with element `positions[i]` replaced by element i of the source.

    Positions are in row-major order.
    """
    count, replaced = math.prod(shape_of(x)), math.prod(shape_of(source))
    # Each element comes from x, or from the source, which is concatenated after it.
    origin = torch.arange(count)
    origin[positions.reshape(-1)] = torch.arange(count, count + replaced)
    flat = [ops.reshape(x, [count]), ops.reshape(source, [replaced])]
    taken = ops.emit(relax.op.take(ops.concat(flat, 0), static_indices(ops, origin), 0))
    return ops.reshape(taken, shape_of(x))
