# SPDX-License-Identifier: Apache-2.0
"""Embedding, advanced indexing, gather and scatter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from tvm import relax

from amp_ir.importer.converters.emitter import Emitter
from amp_ir.importer.converters.promotion import Operand, dtype_of, is_float, shape_of
from amp_ir.importer.converters.registry import converts

aten = torch.ops.aten
Indices: TypeAlias = Sequence[relax.Expr | None]


@converts(aten.embedding.default)
def embedding(
    ops: Emitter,
    weight: relax.Expr,
    ids: relax.Expr,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> relax.Expr:
    """Return rows of the weight; the padding row affects the gradient only."""
    return ops.call("amp_ir.embedding", weight, ids)


@converts(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    ops: Emitter,
    grad: relax.Expr,
    ids: relax.Expr,
    num_embeddings: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> relax.Expr:
    """Return the gradient of the weight, summed over equal ids; zero in the padding row."""
    if scale_grad_by_freq:
        ops.reject("scale_grad_by_freq=True")
    return ops.call(
        "amp_ir.embedding_backward",
        grad,
        ids,
        num_embeddings=num_embeddings,
        padding_idx=None if padding_idx < 0 else padding_idx,
    )


def _only_integers(ops: Emitter, indices: Indices) -> tuple[list[int], list[relax.Expr]]:
    """Return (the indexed axes, the integer tensors that index them)."""
    axes = [axis for axis, one in enumerate(indices) if one is not None]
    ids = [one for one in indices if one is not None]
    for one in ids:
        if dtype_of(one) in ("bool", "uint8"):
            ops.reject("indexing by a mask, whose result has a shape that depends on values")
    return axes, [ops.cast(one, "int64") if dtype_of(one) != "int32" else one for one in ids]


@converts(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(ops: Emitter, x: relax.Expr, indices: Indices) -> relax.Expr:
    """Return x[indices] as NumPy defines it; None stands for a whole axis."""
    axes, ids = _only_integers(ops, indices)
    return ops.call("amp_ir.index", x, *ids, axes=tuple(axes)) if ids else x


@converts(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    ops: Emitter,
    x: relax.Expr,
    indices: Indices,
    values: relax.Expr,
    accumulate: bool = False,
) -> relax.Expr:
    """Return x with values written, or added, at x[indices]."""
    mask = indices[0] if len(indices) == 1 else None
    if mask is not None and dtype_of(mask) == "bool" and _is_same_everywhere(x, mask, values):
        return _masked_put(ops, x, mask, values, accumulate=accumulate)
    axes, ids = _only_integers(ops, indices)
    values = ops.cast(values, dtype_of(x))
    options = {"axes": tuple(axes), "accumulate": accumulate}
    return ops.call("amp_ir.index_put", x, values, *ids, **options)


def _is_same_everywhere(x: relax.Expr, mask: relax.Expr, values: relax.Expr) -> bool:
    """Return whether every position where the mask holds receives the same values."""
    rest = len(shape_of(x)) - len(shape_of(mask))
    shape = shape_of(values)
    return all(extent == 1 for extent in shape[: max(0, len(shape) - rest)])


def _masked_put(
    ops: Emitter, x: relax.Expr, mask: relax.Expr, values: relax.Expr, *, accumulate: bool
) -> relax.Expr:
    """Return x with the same values written, or added, wherever the mask holds.

    The mask is over the leading axes.
    """
    extents = shape_of(mask)
    rest = len(shape_of(x)) - len(extents)
    mask = ops.reshape(mask, [*extents, *[1] * rest])
    kept = shape_of(values)[max(0, len(shape_of(values)) - rest) :]
    value = ops.cast(ops.reshape(values, kept), dtype_of(x))
    return ops.where(mask, ops.add(x, value) if accumulate else value, x)


@converts(aten.index_select.default)
def index_select(ops: Emitter, x: relax.Expr, dim: int, ids: relax.Expr) -> relax.Expr:
    """Return the elements of one axis at the indices, in their order."""
    rank = len(shape_of(x))
    source, axis = (x, dim % rank) if rank else (_flat(ops, x), 0)
    taken = ops.call("amp_ir.index", source, _flat(ops, ids), axes=(axis,), wraps=False)
    return ops.reshape(taken, ops.shape)


@converts(aten.index_add.default)
def index_add(
    ops: Emitter,
    x: relax.Expr,
    dim: int,
    ids: relax.Expr,
    source: relax.Expr,
    *,
    alpha: Operand = 1,
) -> relax.Expr:
    """Return x with alpha * source added at the indices of one axis, one slice per index."""
    scaled = source if alpha == 1 else ops.cast(ops.multiply(source, alpha), dtype_of(x))
    return _put_along(ops, x, dim, ids, scaled, accumulate=True)


@converts(aten.index_copy.default)
def index_copy(
    ops: Emitter, x: relax.Expr, dim: int, ids: relax.Expr, source: relax.Expr
) -> relax.Expr:
    """Return x with source written at the indices of one axis, one slice per index."""
    return _put_along(ops, x, dim, ids, source, accumulate=False)


@converts(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(
    ops: Emitter, x: relax.Expr, dim: int, ids: relax.Expr, value: Operand
) -> relax.Expr:
    """Return x with one value written at the indices of one axis, which may be negative."""
    shape = list(shape_of(x)) or [1]
    axis = dim % len(shape)
    places = ops.full(
        [math.prod(shape_of(ids)), *[1] * (len(shape) - axis - 1)], value, dtype_of(x)
    )
    whole, at = ops.reshape(x, shape), _flat(ops, ids)
    return ops.reshape(ops.call("amp_ir.index_put", whole, places, at, axes=(axis,)), shape_of(x))


def _put_along(
    ops: Emitter, x: relax.Expr, dim: int, ids: relax.Expr, source: relax.Expr, *, accumulate: bool
) -> relax.Expr:
    """Return x with slices of one axis written or added; the indices are non-negative."""
    count = math.prod(shape_of(ids))
    shape = list(shape_of(x)) or [1]
    axis = dim % len(shape)
    values = ops.reshape(source, [*shape[:axis], count, *shape[axis + 1 :]])
    options = {"axes": (axis,), "accumulate": accumulate, "wraps": False}
    put = ops.call("amp_ir.index_put", ops.reshape(x, shape), values, _flat(ops, ids), **options)
    return ops.reshape(put, shape_of(x))


@converts(aten.gather.default)
def gather(
    ops: Emitter, x: relax.Expr, dim: int, ids: relax.Expr, *, sparse_grad: bool = False
) -> relax.Expr:
    """Return result[i, j, ...] = x[ids[i, j, ...], j, ...] for dim 0."""
    if not shape_of(x):
        x, ids = _flat(ops, x), _flat(ops, ids)
    axis = dim % len(shape_of(x))
    found = ops.emit(relax.op.gather_elements(_covered(ops, x, ids, axis), ids, axis))
    return ops.reshape(found, ops.shape)


def _flat(ops: Emitter, x: relax.Expr) -> relax.Expr:
    """Return all elements on one axis; a 0-d tensor becomes one element."""
    return ops.reshape(x, [math.prod(shape_of(x))])


def _covered(ops: Emitter, x: relax.Expr, ids: relax.Expr, axis: int | None) -> relax.Expr:
    """Return x sliced to the extents of the indices, except on `axis`: x may be larger."""
    for other, extent in enumerate(shape_of(ids)):
        if other != axis:
            x = ops.slice(x, other, 0, extent)
    return x


@converts(aten.scatter_add.default)
def scatter_add(
    ops: Emitter, x: relax.Expr, dim: int, ids: relax.Expr, source: relax.Expr
) -> relax.Expr:
    """Return x with source[i, j, ...] added at x[ids[i, j, ...], j, ...] for dim 0."""
    shape = shape_of(x)
    if not shape:
        x, ids, source = (_flat(ops, one) for one in (x, ids, source))
    axis = dim % len(shape_of(x))
    return ops.reshape(ops.call("amp_ir.scatter_add", x, ids, source, axis=axis), shape)


@converts(aten.scatter.src)
def scatter(
    ops: Emitter, x: relax.Expr, dim: int, ids: relax.Expr, source: relax.Expr
) -> relax.Expr:
    """Return x with source[i, j, ...] written at x[ids[i, j, ...], j, ...] for dim 0."""
    return _scatter(ops, x, dim, ids, source, "update")


@converts(aten.scatter.value)
def scatter_value(
    ops: Emitter, x: relax.Expr, dim: int, ids: relax.Expr, value: Operand
) -> relax.Expr:
    """Return x with one value written at x[ids[i, j, ...], j, ...] for dim 0."""
    return _scatter(ops, x, dim, ids, ops.full(shape_of(ids), value, dtype_of(x)), "update")


# ATen's name of a reduction -> that of Relax's scatter_elements, for both ATen spellings.
SCATTER_REDUCTIONS = {
    "add": "add",
    "multiply": "mul",
    "sum": "add",
    "prod": "mul",
    "amax": "max",
    "amin": "min",
}


@converts(aten.scatter.reduce)
def scatter_with(
    ops: Emitter, x: relax.Expr, dim: int, ids: relax.Expr, source: relax.Expr, *, reduce: str
) -> relax.Expr:
    """Return `scatter` with the elements of x and source combined."""
    return _scatter(ops, x, dim, ids, source, SCATTER_REDUCTIONS[reduce])


@converts(aten.scatter_reduce.two)
def scatter_reduce(
    ops: Emitter,
    x: relax.Expr,
    dim: int,
    ids: relax.Expr,
    source: relax.Expr,
    reduce: str,
    *,
    include_self: bool = True,
) -> relax.Expr:
    """Return `scatter` with the sum, mean, product, maximum or minimum of colliding elements."""
    if reduce == "mean" and not is_float(dtype_of(x)):
        ops.reject(f"reduce='mean' of {dtype_of(x)}")
    base = x
    if not include_self:
        # Elements that receive nothing keep their value; the others start from the neutral element.
        neutral = ops.full(shape_of(ids), _neutral(reduce, dtype_of(x)), dtype_of(x))
        base = _scatter(ops, x, dim, ids, neutral, "update")
    if reduce not in ("sum", "mean"):
        return _scatter(ops, base, dim, ids, source, SCATTER_REDUCTIONS[reduce])
    total: relax.Expr = scatter_add(ops, base, dim, ids, source)
    if reduce == "sum":
        return total
    # Counted in float32 whatever the element dtype is: bfloat16 counts to 256.
    begin = ops.full(shape_of(x), 1 if include_self else 0, "float32")
    count = scatter_add(ops, begin, dim, ids, ops.full(shape_of(source), 1, "float32"))
    count = ops.emit(relax.op.maximum(count, ops.constant(1, "float32")))
    return ops.divide(total, ops.cast(count, dtype_of(x)))


def _neutral(reduce: str, dtype: str) -> float | int:
    """Return the neutral element of an ATen reduction; that of the mean is that of the sum."""
    if reduce in ("sum", "mean", "prod"):
        return int(reduce == "prod")
    if is_float(dtype):
        return -math.inf if reduce == "amax" else math.inf
    limits = torch.iinfo(getattr(torch, dtype))
    return limits.min if reduce == "amax" else limits.max


def _scatter(
    ops: Emitter, x: relax.Expr, dim: int, ids: relax.Expr, source: relax.Expr, reduction: str
) -> relax.Expr:
    if not shape_of(x):
        x, ids, source = (_flat(ops, one) for one in (x, ids, source))
    source = _covered(ops, source, ids, None)
    axis = dim % len(shape_of(x))
    written = ops.emit(relax.op.scatter_elements(x, ids, source, axis, reduction))
    return ops.reshape(written, ops.shape)


@converts(aten.masked_scatter.default)
def masked_scatter(ops: Emitter, x: relax.Expr, mask: relax.Expr, source: relax.Expr) -> relax.Expr:
    """Return x with the next element of source, in order, wherever the mask holds."""
    shape = ops.shape
    flat_mask = ops.reshape(ops.broadcast(mask, shape), [math.prod(shape)])
    count = math.prod(shape_of(source))
    place = _order_of_masked(ops, flat_mask, count)
    if count < math.prod(shape):
        place = ops.add(place, _zero_if_enough(ops, flat_mask, count))
    flat = _flat(ops, source)
    values = ops.emit(relax.op.take(ops.cast(flat, dtype_of(x)), place, 0))
    return ops.where(ops.reshape(flat_mask, shape), ops.reshape(values, shape), x)


def _zero_if_enough(ops: Emitter, flat_mask: relax.Expr, count: int) -> relax.Expr:
    """Return 0, int64[1], read at the number of masked elements: out of range above `count`."""
    number = ops.emit(relax.op.sum(ops.cast(flat_mask, "int64"), [0], keepdims=True))
    zeros = ops.full([count + 1], 0, "int64")
    return ops.call("amp_ir.index", zeros, number, axes=(0,), wraps=False)


@converts(aten.masked_scatter_backward.default)
def masked_scatter_backward(
    ops: Emitter, grad: relax.Expr, mask: relax.Expr, sizes: Sequence[int]
) -> relax.Expr:
    """Return the gradients where the mask holds, packed in order, followed by zeros."""
    count = math.prod(shape_of(grad))
    flat_mask = ops.reshape(ops.broadcast(mask, shape_of(grad)), [count])
    place = _order_of_masked(ops, flat_mask, math.prod(sizes))
    taken = ops.where(flat_mask, ops.reshape(grad, [count]), ops.constant(0, dtype_of(grad)))
    zeros = ops.full([math.prod(sizes)], 0, dtype_of(grad))
    return ops.reshape(ops.call("amp_ir.scatter_add", zeros, place, taken, axis=0), sizes)


def _order_of_masked(ops: Emitter, flat_mask: relax.Expr, count: int) -> relax.Expr:
    """Return how many masked elements precede each one, clamped below `count`: int64[n]."""
    taken = ops.emit(relax.op.cumsum(ops.cast(flat_mask, "int64"), 0))
    place = ops.emit(relax.op.minimum(ops.subtract(taken, 1), ops.constant(count - 1, "int64")))
    return ops.emit(relax.op.maximum(place, ops.constant(0, "int64")))


@converts(aten.take.default)
def take(ops: Emitter, x: relax.Expr, ids: relax.Expr) -> relax.Expr:
    """Return elements of the flattened x."""
    return ops.call("amp_ir.index", ops.reshape(x, [math.prod(shape_of(x))]), ids, axes=(0,))


@converts(aten.put.default)
def put(
    ops: Emitter, x: relax.Expr, ids: relax.Expr, source: relax.Expr, accumulate: bool = False
) -> relax.Expr:
    """Return x with elements of its flattened form replaced, or added to."""
    flat = ops.reshape(x, [math.prod(shape_of(x))])
    source = ops.reshape(source, shape_of(ids))
    options = {"axes": (0,), "accumulate": accumulate}
    return ops.reshape(ops.call("amp_ir.index_put", flat, source, ids, **options), shape_of(x))
