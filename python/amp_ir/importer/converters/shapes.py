# SPDX-License-Identifier: Apache-2.0
"""Views and rearrangements: reshape, permute, slice, concatenate, pad, repeat."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from tvm import relax

from amp_ir.importer.converters.emitter import Emitter
from amp_ir.importer.converters.promotion import Scalar, dtype_of, promoted_dtype, shape_of
from amp_ir.importer.converters.registry import converts

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
    """Return the same elements in PyTorch's result shape."""
    return ops.reshape(x, ops.shape)


@converts(aten.permute.default)
def permute(ops: Emitter, x: relax.Expr, dims: Sequence[int]) -> relax.Expr:
    """Return the axes in another order."""
    return ops.permute(x, dims)


@converts(aten.transpose.int)
def transpose(ops: Emitter, x: relax.Expr, dim0: int, dim1: int) -> relax.Expr:
    """Exchange two axes."""
    axes = list(range(len(shape_of(x))))
    if axes:
        axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
    return ops.permute(x, axes)


@converts(aten.t.default)
def t(ops: Emitter, x: relax.Expr) -> relax.Expr:
    """Return a matrix transposed; a vector or number unchanged."""
    return ops.permute(x, range(len(shape_of(x)))[::-1])


@converts(aten.expand.default)
def expand(
    ops: Emitter, x: relax.Expr, size: Sequence[int], *, implicit: bool = False
) -> relax.Expr:
    """Repeat x along axes of extent 1."""
    return ops.broadcast(x, ops.shape)


@converts(aten.repeat.default, aten.tile.default)
def repeat(ops: Emitter, x: relax.Expr, repeats: Sequence[int]) -> relax.Expr:
    """Return x tiled `repeats` times along each axis."""
    extents = shape_of(x)
    rank = max(len(repeats), len(extents))
    extents = (1,) * (rank - len(extents)) + extents
    repeats = [1] * (rank - len(repeats)) + list(repeats)
    if 0 in ops.shape:
        return ops.full(ops.shape, 0, ops.dtype)
    split = list(itertools.chain.from_iterable((1, extent) for extent in extents))
    wide = itertools.chain.from_iterable(zip(repeats, extents, strict=True))
    return ops.reshape(ops.broadcast(ops.reshape(x, split), list(wide)), ops.shape)


@converts(aten.cat.default)
def cat(ops: Emitter, tensors: Sequence[relax.Expr], dim: int = 0) -> relax.Expr:
    """Return the tensors concatenated, in their common dtype."""
    dtype = promoted_dtype(*tensors)
    # Legacy: PyTorch skips empty vectors whatever the rank of the others.
    parts = [x for x in tensors if shape_of(x) != (0,)] or tensors[:1]
    return ops.concat([ops.cast(x, dtype) for x in parts], dim % max(len(ops.shape), 1))


@converts(aten.stack.default)
def stack(ops: Emitter, tensors: Sequence[relax.Expr], dim: int = 0) -> relax.Expr:
    """Return the tensors stacked along a new axis."""
    axis = dim % len(ops.shape)
    dtype = promoted_dtype(*tensors)
    shape = [*ops.shape[:axis], 1, *ops.shape[axis + 1 :]]
    return ops.concat([ops.reshape(ops.cast(x, dtype), shape) for x in tensors], axis)


@converts(aten.constant_pad_nd.default)
def constant_pad_nd(
    ops: Emitter, x: relax.Expr, pad: Sequence[int], value: Scalar = 0
) -> relax.Expr:
    """Return x with a border of one value; a negative width crops."""
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
    """Return x with the order of the elements reversed along some axes.

    A tensor without axes may be named by axis 0.
    """
    for dim in dims if shape_of(x) else ():
        x = ops.emit(relax.op.flip(x, dim % len(shape_of(x))))
    return x


@converts(aten.roll.default)
def roll(
    ops: Emitter, x: relax.Expr, shifts: Sequence[int], dims: Sequence[int] = ()
) -> relax.Expr:
    """Return x with its elements rotated along some axes."""
    if not dims:
        flat = ops.reshape(x, [math.prod(shape_of(x))])
        return ops.reshape(_roll(ops, flat, shifts[0], 0), ops.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        x = _roll(ops, x, shift, dim % len(shape_of(x)))
    return x


def _roll(ops: Emitter, x: relax.Expr, shift: int, axis: int) -> relax.Expr:
    extent = shape_of(x)[axis]
    cut = -shift % extent if extent else 0
    return ops.concat([ops.slice(x, axis, cut, extent), ops.slice(x, axis, 0, cut)], axis)


@converts(aten.tril.default)
def tril(ops: Emitter, x: relax.Expr, diagonal: int = 0) -> relax.Expr:
    """Return the lower triangle; zero above diagonal number `diagonal`."""
    return ops.emit(relax.op.tril(x, diagonal))


@converts(aten.triu.default)
def triu(ops: Emitter, x: relax.Expr, diagonal: int = 0) -> relax.Expr:
    """Return the upper triangle; zero below diagonal number `diagonal`."""
    return ops.emit(relax.op.triu(x, diagonal))
