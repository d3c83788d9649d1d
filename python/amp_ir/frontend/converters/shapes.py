# SPDX-License-Identifier: Apache-2.0
"""Views and rearrangements: reshape, permute, slice, concatenate, pad, repeat."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from tvm import relax

from amp_ir.frontend.converters.creation import static_indices
from amp_ir.frontend.converters.emitter import Emitter
from amp_ir.frontend.converters.promotion import Scalar, dtype_of, promoted_dtype, shape_of
from amp_ir.frontend.converters.registry import converts

aten = torch.ops.aten


@converts(
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.flatten.using_ints,
)
def reshape(ops: Emitter, x: relax.Expr, *_shape: object) -> relax.Expr:
    """The same elements in PyTorch's result shape."""
    return ops.reshape(x, ops.shape)


@converts(aten.permute.default)
def permute(ops: Emitter, x: relax.Expr, dims: Sequence[int]) -> relax.Expr:
    """The axes in another order."""
    return ops.permute(x, dims)


@converts(aten.transpose.int)
def transpose(ops: Emitter, x: relax.Expr, dim0: int, dim1: int) -> relax.Expr:
    """Two axes exchanged."""
    axes = list(range(len(shape_of(x))))
    if axes:
        axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
    return ops.permute(x, axes)


@converts(aten.t.default)
def t(ops: Emitter, x: relax.Expr) -> relax.Expr:
    """A matrix transposed; a vector or number as it is."""
    return ops.permute(x, range(len(shape_of(x)))[::-1])


@converts(aten.expand.default)
def expand(
    ops: Emitter, x: relax.Expr, size: Sequence[int], *, implicit: bool = False
) -> relax.Expr:
    """x repeated along axes of extent 1."""
    return ops.broadcast(x, ops.shape)


@converts(aten.repeat.default, aten.tile.default)
def repeat(ops: Emitter, x: relax.Expr, repeats: Sequence[int]) -> relax.Expr:
    """x laid side by side `repeats` times along each axis."""
    extents = shape_of(x)
    rank = max(len(repeats), len(extents))
    extents = (1,) * (rank - len(extents)) + extents
    repeats = [1] * (rank - len(repeats)) + list(repeats)
    if 0 in ops.shape:
        return ops.full(ops.shape, 0, ops.dtype)
    split = list(itertools.chain.from_iterable((1, extent) for extent in extents))
    wide = itertools.chain.from_iterable(zip(repeats, extents, strict=True))
    return ops.reshape(ops.broadcast(ops.reshape(x, split), list(wide)), ops.shape)


@converts(aten.slice.Tensor)
def slice_(
    ops: Emitter,
    x: relax.Expr,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> relax.Expr:
    """Every `step`-th element of one axis."""
    axis = dim % len(shape_of(x))
    begin, stop, _ = slice(start, end).indices(shape_of(x)[axis])
    return ops.slice(x, axis, begin, max(begin, stop), step=step)


@converts(aten.select.int)
def select(ops: Emitter, x: relax.Expr, dim: int, index: int) -> relax.Expr:
    """One position of an axis, which is dropped."""
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
    """x with the elements of one slice replaced."""
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
    """Zeros with the gradient in the slice that was taken."""
    zeros = ops.full(sizes, 0, dtype_of(grad))
    result: relax.Expr = slice_scatter(ops, zeros, grad, dim, start, end, step)
    return result


@converts(aten.select_scatter.default)
def select_scatter(
    ops: Emitter, x: relax.Expr, source: relax.Expr, dim: int, index: int
) -> relax.Expr:
    """x with one position of an axis replaced."""
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
    """Zeros with the gradient at the position that was taken."""
    zeros = ops.full(sizes, 0, dtype_of(grad))
    result: relax.Expr = select_scatter(ops, zeros, grad, dim, index)
    return result


@converts(aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default)
def split_with_sizes(
    ops: Emitter, x: relax.Expr, sizes: Sequence[int], dim: int = 0
) -> tuple[relax.Expr, ...]:
    """Consecutive pieces of one axis."""
    axis = dim % len(shape_of(x))
    ends = list(itertools.accumulate(sizes))
    return tuple(ops.slice(x, axis, end - size, end) for size, end in zip(sizes, ends, strict=True))


@converts(aten.split.Tensor, aten.unsafe_split.Tensor, aten.unsafe_chunk.default)
def split(ops: Emitter, x: relax.Expr, _size: int, dim: int = 0) -> tuple[relax.Expr, ...]:
    """Pieces of equal extent; the last may be shorter."""
    axis = dim % len(shape_of(x))
    sizes = [piece.shape[axis] for piece in ops.result]
    result: tuple[relax.Expr, ...] = split_with_sizes(ops, x, sizes, dim)
    return result


@converts(aten.unbind.int)
def unbind(ops: Emitter, x: relax.Expr, dim: int = 0) -> tuple[relax.Expr, ...]:
    """Every position of one axis."""
    axis = dim % len(shape_of(x))
    return tuple(
        ops.reshape(ops.slice(x, axis, position, position + 1), one.shape)
        for position, one in enumerate(ops.result)
    )


@converts(aten.cat.default)
def cat(ops: Emitter, tensors: Sequence[relax.Expr], dim: int = 0) -> relax.Expr:
    """The tensors one after another, in their common dtype."""
    dtype = promoted_dtype(*tensors)
    # Legacy: PyTorch skips empty vectors whatever the rank of the others.
    parts = [x for x in tensors if shape_of(x) != (0,)] or tensors[:1]
    return ops.concat([ops.cast(x, dtype) for x in parts], dim % max(len(ops.shape), 1))


@converts(aten.stack.default)
def stack(ops: Emitter, tensors: Sequence[relax.Expr], dim: int = 0) -> relax.Expr:
    """The tensors along a new axis."""
    axis = dim % len(ops.shape)
    dtype = promoted_dtype(*tensors)
    shape = [*ops.shape[:axis], 1, *ops.shape[axis + 1 :]]
    return ops.concat([ops.reshape(ops.cast(x, dtype), shape) for x in tensors], axis)


@converts(aten.constant_pad_nd.default)
def constant_pad_nd(
    ops: Emitter, x: relax.Expr, pad: Sequence[int], value: Scalar = 0
) -> relax.Expr:
    """x with a border of one value; a negative width cuts off."""
    rank = len(shape_of(x))
    for position in range(len(pad) // 2):
        axis = rank - 1 - position
        before, after = pad[2 * position], pad[2 * position + 1]
        extent = shape_of(x)[axis]
        x = ops.slice(x, axis, max(0, -before), extent - max(0, -after))
        shape = shape_of(x)
        borders = [
            ops.full([*shape[:axis], width, *shape[axis + 1 :]], value, dtype_of(x))
            if width > 0
            else None
            for width in (before, after)
        ]
        parts = [part for part in (borders[0], x, borders[1]) if part is not None]
        x = ops.concat(parts, axis)
    return x


@converts(aten.flip.default)
def flip(ops: Emitter, x: relax.Expr, dims: Sequence[int]) -> relax.Expr:
    """The order of the elements reversed along some axes."""
    for dim in dims:
        x = ops.emit(relax.op.flip(x, dim % len(shape_of(x))))
    return x


@converts(aten.roll.default)
def roll(
    ops: Emitter, x: relax.Expr, shifts: Sequence[int], dims: Sequence[int] = ()
) -> relax.Expr:
    """The elements moved along some axes, those that fall off returning at the other end."""
    if not dims:
        flat = ops.reshape(x, [_count(shape_of(x))])
        return ops.reshape(_roll(ops, flat, shifts[0], 0), ops.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        x = _roll(ops, x, shift, dim % len(shape_of(x)))
    return x


def _roll(ops: Emitter, x: relax.Expr, shift: int, axis: int) -> relax.Expr:
    extent = shape_of(x)[axis]
    cut = -shift % extent if extent else 0
    return ops.concat([ops.slice(x, axis, cut, extent), ops.slice(x, axis, 0, cut)], axis)


def _count(shape: Sequence[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


@converts(aten.tril.default)
def tril(ops: Emitter, x: relax.Expr, diagonal: int = 0) -> relax.Expr:
    """The lower triangle; zero above diagonal number `diagonal`."""
    return ops.emit(relax.op.tril(x, diagonal))


@converts(aten.triu.default)
def triu(ops: Emitter, x: relax.Expr, diagonal: int = 0) -> relax.Expr:
    """The upper triangle; zero below diagonal number `diagonal`."""
    return ops.emit(relax.op.triu(x, diagonal))


@converts(aten.diagonal.default)
def diagonal(
    ops: Emitter, x: relax.Expr, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> relax.Expr:
    """One diagonal of two axes, as the last axis."""
    return _view(ops, x, _positions(x).diagonal(offset, dim1, dim2))


@converts(aten.unfold.default)
def unfold(ops: Emitter, x: relax.Expr, dim: int, size: int, step: int) -> relax.Expr:
    """Windows of one axis, as a new last axis."""
    return _view(ops, x, _positions(x).unfold(dim, size, step))


def _positions(x: relax.Expr) -> torch.Tensor:
    return torch.arange(_count(shape_of(x))).reshape(shape_of(x))


def _view(ops: Emitter, x: relax.Expr, positions: torch.Tensor) -> relax.Expr:
    """Element i of the result is element `positions[i]` of x in row-major order."""
    flat = ops.reshape(x, [_count(shape_of(x))])
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
    """x with one diagonal of two axes replaced."""
    return _overwritten(ops, x, source, _positions(x).diagonal(offset, dim1, dim2))


def _overwritten(
    ops: Emitter, x: relax.Expr, source: relax.Expr, positions: torch.Tensor
) -> relax.Expr:
    """x with element `positions[i]` in row-major order replaced by element i of the source."""
    count, replaced = _count(shape_of(x)), _count(shape_of(source))
    # Each element comes from x itself, or from the source, which follows it.
    origin = torch.arange(count)
    origin[positions.reshape(-1)] = torch.arange(count, count + replaced)
    flat = [ops.reshape(x, [count]), ops.reshape(source, [replaced])]
    taken = ops.emit(relax.op.take(ops.concat(flat, 0), static_indices(ops, origin), 0))
    return ops.reshape(taken, shape_of(x))
