# SPDX-License-Identifier: Apache-2.0
"""Sorting, and the positions of extrema."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from tvm import relax

from amp_ir.importer.converters.emitter import Emitter
from amp_ir.importer.converters.promotion import dtype_of, is_float, shape_of
from amp_ir.importer.converters.reductions import ReductionOp, axes_of, extremum
from amp_ir.importer.converters.registry import Converter, converts

aten = torch.ops.aten


PositionOp: TypeAlias = Callable[[relax.Expr, int, bool], relax.Expr]


def _first_position(op: PositionOp) -> Converter:
    """Return a converter to the first position of an extremum; of all elements without `dim`."""

    def convert(
        ops: Emitter, x: relax.Expr, dim: int | None = None, keepdim: bool = False
    ) -> relax.Expr:
        return _arg_extremum(ops, op, x, dim)

    return convert


def _arg_extremum(
    ops: Emitter,
    op: PositionOp,
    x: relax.Expr,
    dim: int | None,
    shape: Sequence[int] | None = None,
) -> relax.Expr:
    shape = ops.shape if shape is None else shape
    if not shape_of(x):
        return ops.full(shape, 0, "int64")
    numbers = ops.cast(x, "int8") if dtype_of(x) == "bool" else x
    if dim is None:
        numbers, dim = ops.reshape(numbers, [math.prod(shape_of(x))]), 0
    return ops.reshape(ops.emit(op(numbers, dim % len(shape_of(numbers)), True)), shape)


def _extremum_with_position(op: ReductionOp, position: PositionOp) -> Converter:
    """Return a converter to (the extrema, their first positions) along one axis."""

    def convert(
        ops: Emitter, x: relax.Expr, dim: int, keepdim: bool = False
    ) -> tuple[relax.Expr, relax.Expr]:
        values = extremum(ops, op, x, axes_of(x, dim), keepdims=keepdim)
        return values, _arg_extremum(ops, position, x, dim, shape_of(values))

    return convert


max_dim = _extremum_with_position(relax.op.max, relax.op.argmax)
converts(aten.max.dim)(max_dim)
converts(aten.min.dim)(_extremum_with_position(relax.op.min, relax.op.argmin))
converts(aten.argmax.default)(_first_position(relax.op.argmax))
converts(aten.argmin.default)(_first_position(relax.op.argmin))


@converts(aten.sort.default)
def sort(
    ops: Emitter, x: relax.Expr, dim: int = -1, descending: bool = False
) -> tuple[relax.Expr, relax.Expr]:
    """Return (sorted elements, their indices in x); equal elements keep their order."""
    return _sorted(ops, x, dim, descending=descending)


@converts(aten.sort.stable)
def stable_sort(
    ops: Emitter,
    x: relax.Expr,
    *,
    stable: bool | None = None,
    dim: int = -1,
    descending: bool = False,
) -> tuple[relax.Expr, relax.Expr]:
    """Return what `sort` returns."""
    return _sorted(ops, x, dim, descending=descending)


@converts(aten.argsort.default)
def argsort(ops: Emitter, x: relax.Expr, dim: int = -1, descending: bool = False) -> relax.Expr:
    """Return the index in x of each sorted element."""
    return _sorted(ops, x, dim, descending=descending)[1]


def _sorted(
    ops: Emitter, x: relax.Expr, dim: int, *, descending: bool
) -> tuple[relax.Expr, relax.Expr]:
    if not shape_of(x):
        return x, ops.constant(0, "int64")
    axis = dim % len(shape_of(x))
    numbers = ops.cast(x, "int8") if dtype_of(x) == "bool" else x
    order = ops.emit(relax.op.argsort(numbers, axis, descending, "int64"))
    return ops.cast(ops.emit(relax.op.gather_elements(numbers, order, axis)), dtype_of(x)), order


@converts(aten.topk.default)
def topk(
    ops: Emitter,
    x: relax.Expr,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
) -> tuple[relax.Expr, ...]:
    """Return (the k largest or smallest elements, their positions); always sorted."""
    if not shape_of(x):
        return x, ops.constant(0, "int64")
    axis = dim % len(shape_of(x))
    return ops.fields(ops.emit(relax.op.topk(x, k, axis, "both", largest, "int64")))


@converts(aten.bucketize.Tensor)
def bucketize(
    ops: Emitter,
    x: relax.Expr,
    boundaries: relax.Expr,
    *,
    out_int32: bool = False,
    right: bool = False,
) -> relax.Expr:
    """Return how many sorted boundaries are below each element (at or below it with `right`).

    PyTorch's binary search, step by step: what it finds among boundaries that are NaN or not sorted
    depends on the way it goes. NaN is above all boundaries.
    """
    shape, count = shape_of(x), shape_of(boundaries)[-1]
    first = ops.full(shape, 0, "int64")
    last = ops.full(shape, count, "int64")
    at_most = ops.constant(max(count - 1, 0), "int64")
    for _ in range(count.bit_length()):
        width = ops.emit(relax.op.subtract(last, first))
        half = ops.emit(relax.op.right_shift(width, ops.constant(1, "int64")))
        middle = ops.emit(relax.op.minimum(ops.emit(relax.op.add(first, half)), at_most))
        there = _at(ops, boundaries, middle)
        is_above = ops.binary(relax.op.greater if right else relax.op.greater_equal, there, x)
        is_open = ops.emit(relax.op.greater(width, ops.constant(0, "int64")))
        goes_up = ops.emit(relax.op.logical_and(ops.emit(relax.op.logical_not(is_above)), is_open))
        next_one = ops.emit(relax.op.add(middle, ops.constant(1, "int64")))
        last = ops.where(goes_up, last, middle)
        first = ops.where(goes_up, next_one, first)
    return ops.cast(first, ops.dtype)


def _at(ops: Emitter, boundaries: relax.Expr, places: relax.Expr) -> relax.Expr:
    """Return boundaries at places: of all, or of the places' own row."""
    if len(shape_of(boundaries)) == 1:
        return ops.emit(relax.op.take(boundaries, places, 0))
    return ops.emit(relax.op.gather_elements(boundaries, places, len(shape_of(boundaries)) - 1))


@converts(aten.searchsorted.Tensor)
def searchsorted(
    ops: Emitter,
    boundaries: relax.Expr,
    x: relax.Expr,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: relax.Expr | None = None,
) -> relax.Expr:
    """Return what `bucketize` returns, with the boundaries of the same row if they are a matrix."""
    if sorter is not None:
        ops.reject("a sorter")
    result: relax.Expr = bucketize(ops, x, boundaries, right=right or side == "right")
    return result


@converts(aten.kthvalue.default)
def kthvalue(
    ops: Emitter, x: relax.Expr, k: int, dim: int = -1, keepdim: bool = False
) -> tuple[relax.Expr, relax.Expr]:
    """Return (the k-th smallest elements, k from 1, their indices) along one axis."""
    if not shape_of(x):
        return x, ops.constant(0, "int64")
    axis = dim % len(shape_of(x))
    found = (ops.slice(one, axis, k - 1, k) for one in _sorted(ops, x, axis, descending=False))
    shape = tuple(int(extent) for extent in ops.result[0].shape)
    values, places = (ops.reshape(one, shape) for one in found)
    return values, places


@converts(aten.median.dim)
def median_dim(
    ops: Emitter, x: relax.Expr, dim: int, keepdim: bool = False
) -> tuple[relax.Expr, relax.Expr]:
    """Return (the medians, their indices) along one axis; of an even count the lower one.

    Where there is a NaN, the median is the first one.
    """
    count = shape_of(x)[dim] if shape_of(x) else 1
    values, places = kthvalue(ops, x, (count + 1) // 2, dim, keepdim)
    if not is_float(dtype_of(x)):
        return values, places
    # A maximum is NaN where there is one, and its position is that of the first NaN.
    largest, first = max_dim(ops, x, dim, keepdim)
    no_number = ops.emit(relax.op.isnan(largest))
    return ops.where(no_number, largest, values), ops.where(no_number, first, places)


@converts(aten.median.default)
def median(ops: Emitter, x: relax.Expr) -> relax.Expr:
    """Return the median of all elements: the lower one of an even count; NaN if there is one."""
    count = math.prod(shape_of(x))
    values = _sorted(ops, ops.reshape(x, [count]), 0, descending=False)[0]
    middle = ops.reshape(ops.slice(values, 0, (count - 1) // 2, (count + 1) // 2), [])
    if not is_float(dtype_of(x)):
        return middle
    # Sorting puts NaN at the end.
    last = ops.reshape(ops.slice(values, 0, count - 1, count), [])
    return ops.where(ops.emit(relax.op.isnan(last)), last, middle)
