# SPDX-License-Identifier: Apache-2.0
"""Reductions and scans."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from tvm import relax

from amp_ir.importer.converters.emitter import Emitter
from amp_ir.importer.converters.promotion import Scalar, dtype_of, shape_of
from amp_ir.importer.converters.registry import Converter, converts

aten = torch.ops.aten


Axes: TypeAlias = Sequence[int] | int | None
ReductionOp: TypeAlias = Callable[[relax.Expr, list[int], bool], relax.Expr]


def axes_of(x: relax.Expr, dims: Axes) -> list[int]:
    """Return PyTorch's `dim` as sorted non-negative axes; None or an empty list is all."""
    rank = len(shape_of(x))
    if dims is None or dims == []:
        return list(range(rank))
    several = [dims] if isinstance(dims, int) else dims
    return sorted(dim % max(rank, 1) for dim in several) if rank else []


def reduce(
    ops: Emitter,
    op: ReductionOp,
    x: relax.Expr,
    axes: list[int],
    *,
    keepdims: bool,
) -> relax.Expr:
    """Return `op` over the axes, or x itself where there are none (a 0-d tensor)."""
    return ops.emit(op(x, axes, keepdims)) if axes else x


def _reduction(op: ReductionOp) -> Converter:
    def convert(
        ops: Emitter,
        x: relax.Expr,
        dims: Axes = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> relax.Expr:
        return reduce(ops, op, ops.cast(x, ops.dtype), axes_of(x, dims), keepdims=keepdim)

    return convert


# In the result's dtype: int64 for sums and products of integers and bool.
converts(aten.sum.dim_IntList, aten.sum.default)(_reduction(relax.op.sum))
converts(aten.mean.dim, aten.mean.default)(_reduction(relax.op.mean))
converts(aten.prod.dim_int, aten.prod.default)(_reduction(relax.op.prod))


def _extremum(op: ReductionOp, dtype: str | None = None) -> Converter:
    """Return a converter to `op` over some axes of x, or of x in `dtype`."""

    def convert(
        ops: Emitter, x: relax.Expr, dims: Axes = None, keepdim: bool = False
    ) -> relax.Expr:
        numbers = x if dtype is None else ops.cast(x, dtype)
        return ops.cast(extremum(ops, op, numbers, axes_of(x, dims), keepdims=keepdim), ops.dtype)

    return convert


converts(aten.amax.default, aten.max.default)(_extremum(relax.op.max))
converts(aten.amin.default, aten.min.default)(_extremum(relax.op.min))
# Some element is not zero, and none is zero.
converts(aten.any.default, aten.any.dim, aten.any.dims)(_extremum(relax.op.max, "bool"))
converts(aten.all.default, aten.all.dim, aten.all.dims)(_extremum(relax.op.min, "bool"))


def extremum(
    ops: Emitter,
    op: ReductionOp,
    x: relax.Expr,
    axes: list[int],
    *,
    keepdims: bool,
) -> relax.Expr:
    """Reduce with max or min; bool is reduced as int8, since TVM does not order it."""
    numbers = ops.cast(x, "int8") if dtype_of(x) == "bool" else x
    return ops.cast(reduce(ops, op, numbers, axes, keepdims=keepdims), dtype_of(x))


@converts(aten.var.correction)
def var(
    ops: Emitter,
    x: relax.Expr,
    dims: Axes = None,
    *,
    correction: Scalar | None = None,
    keepdim: bool = False,
) -> relax.Expr:
    """Return the mean squared distance from the mean, with divisor n - correction."""
    return _var_mean(ops, x, dims, correction, keepdims=keepdim)[0]


@converts(aten.var.default)
def var_of_all(ops: Emitter, x: relax.Expr, unbiased: bool = True) -> relax.Expr:
    """Return the variance of all elements."""
    return _var_mean(ops, x, None, int(unbiased), keepdims=False)[0]


@converts(aten.var.dim)
def var_dim(
    ops: Emitter, x: relax.Expr, dims: Axes, unbiased: bool = True, keepdim: bool = False
) -> relax.Expr:
    """Return the variance along some axes."""
    return _var_mean(ops, x, dims, int(unbiased), keepdims=keepdim)[0]


@converts(aten.var_mean.correction)
def var_mean(
    ops: Emitter,
    x: relax.Expr,
    dims: Axes = None,
    *,
    correction: Scalar | None = None,
    keepdim: bool = False,
) -> tuple[relax.Expr, relax.Expr]:
    """Return (variance, mean)."""
    return _var_mean(ops, x, dims, correction, keepdims=keepdim)


@converts(aten.std.correction)
def std(
    ops: Emitter,
    x: relax.Expr,
    dims: Axes = None,
    *,
    correction: Scalar | None = None,
    keepdim: bool = False,
) -> relax.Expr:
    """Return the square root of the variance."""
    variance = _var_mean(ops, x, dims, correction, keepdims=keepdim)[0]
    return ops.emit(relax.op.sqrt(variance))


def _var_mean(
    ops: Emitter, x: relax.Expr, dims: Axes, correction: Scalar | None, *, keepdims: bool
) -> tuple[relax.Expr, relax.Expr]:
    """Return (variance, mean), computed in float64, as PyTorch does on a CPU.

    In float32 the mean of large numbers has an error larger than their differences, and squares of
    2e19 are infinite.
    """
    axes, dtype = axes_of(x, dims), dtype_of(x)
    count = math.prod(shape_of(x)[axis] for axis in axes)
    x = ops.cast(x, "float64")
    average = reduce(ops, relax.op.mean, x, axes, keepdims=True)
    distance = ops.subtract(x, average)
    total = reduce(ops, relax.op.sum, ops.multiply(distance, distance), axes, keepdims=keepdims)
    divisor = max(0.0, count - (1 if correction is None else correction))
    variance = ops.cast(ops.divide(total, float(divisor)), dtype)
    return variance, ops.cast(ops.reshape(average, shape_of(total)), dtype)


@converts(aten.linalg_vector_norm.default)
def vector_norm(
    ops: Emitter,
    x: relax.Expr,
    order: Scalar = 2,
    dims: Axes = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> relax.Expr:
    """Return (sum of |x| ** order) ** (1 / order), in float32 or wider and rounded once."""
    wide = ops.cast(x, "float64" if ops.dtype == "float64" else "float32")
    return ops.cast(_norm(ops, wide, order, axes_of(x, dims), keepdims=keepdim), ops.dtype)


@converts(aten.dist.default)
def dist(ops: Emitter, x: relax.Expr, y: relax.Expr, order: Scalar = 2) -> relax.Expr:
    """Return the norm of x - y over all elements."""
    result: relax.Expr = vector_norm(ops, ops.subtract(x, y), order)
    return result


def _norm(
    ops: Emitter, x: relax.Expr, order: Scalar, axes: list[int], *, keepdims: bool
) -> relax.Expr:
    if order == 2:
        total = reduce(ops, relax.op.sum, ops.multiply(x, x), axes, keepdims=keepdims)
        return ops.emit(relax.op.sqrt(total))
    if order == 0:
        count = ops.cast(ops.cast(x, "bool"), dtype_of(x))
        return reduce(ops, relax.op.sum, count, axes, keepdims=keepdims)
    size = ops.emit(relax.op.abs(x))
    if math.isinf(order):
        extremum = relax.op.max if order > 0 else relax.op.min
        return reduce(ops, extremum, size, axes, keepdims=keepdims)
    if order == 1:
        return reduce(ops, relax.op.sum, size, axes, keepdims=keepdims)
    powers = ops.binary(relax.op.power, size, float(order))
    total = reduce(ops, relax.op.sum, powers, axes, keepdims=keepdims)
    return ops.binary(relax.op.power, total, 1.0 / order)


def _scan(op: Callable[[relax.Expr, int], relax.Expr]) -> Converter:
    def convert(
        ops: Emitter, x: relax.Expr, dim: int, *, dtype: torch.dtype | None = None
    ) -> relax.Expr:
        value = ops.cast(x, ops.dtype)
        return ops.emit(op(value, dim % len(ops.shape))) if ops.shape else value

    return convert


# Along one axis, in the result's dtype: int64 for integers and bool.
converts(aten.cumsum.default)(_scan(relax.op.cumsum))
converts(aten.cumprod.default)(_scan(relax.op.cumprod))
