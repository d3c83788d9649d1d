# SPDX-License-Identifier: Apache-2.0
"""Lowering of the poolings. Gradients gather over the windows that cover an element: no scatter.

A pooling is a reduction over an index space [*batch, *out, *window]; along each spatial axis
`pooling_windows` says which elements a window holds and which windows hold an element.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx

from amp_ir.loops import math as m
from amp_ir.loops.body_context import let
from amp_ir.loops.builders import flatten, pointwise, reduce, reshape
from amp_ir.loops.codegen.kernel_buffers import stored_element
from amp_ir.loops.ir import Index, TensorSpec, Value, compute_dtype
from amp_ir.loops.lowering_registry import Lowering, lowers
from amp_ir.loops.lowerings.pooling_windows import Adaptive, Sliding, number

_FAR = 2**31 - 1


Axes = Sequence[Any]


def _guarded(valid: Sequence[Any], element: Any, otherwise: Any) -> Any:
    return m.select(tirx.all(*valid) if len(valid) > 1 else valid[0], element, otherwise)


def _windows(x: Value, axes: Axes, body: Callable[..., Any]) -> tuple[tuple[int, ...], Any]:
    """Return the index space [*batch, *out, *window] and `body(place in x, valid)` over it."""
    n = len(axes)
    batch = x.shape[: len(x.shape) - n]
    space = (*batch, *(axis.count for axis in axes), *(axis.width for axis in axes))

    def element(*i: Any) -> Any:
        outs, places = i[len(batch) : len(batch) + n], i[len(batch) + n :]
        found = [axis.element(o, p) for axis, o, p in zip(axes, outs, places, strict=True)]
        at = [m.clamp(e, axis.extent) for (e, _), axis in zip(found, axes, strict=True)]
        return body((*i[: len(batch)], *at), [valid for _, valid in found], i[: len(batch) + n])

    return space, element


def _last(space: Sequence[int], n: int) -> range:
    return range(len(space) - n, len(space))


# Windows up to this many places are written out, so that neighbouring results share vectors;
# larger ones are loops of their own.
_WRITTEN_OUT = 16


def _places(counts: Sequence[int]) -> list[tuple[Any, ...]] | None:
    """Return every place of a window of `counts`, as index literals; None if there are many."""
    if math.prod(counts) > _WRITTEN_OUT:
        return None
    return [tuple(number(k) for k in place) for place in itertools.product(*map(range, counts))]


def _small_max_pool(
    op: Lowering, x: Value, axes: Axes, places: list[tuple[Any, ...]]
) -> tuple[Value, Value]:
    """Scan the places of a window in order for the first maximum, or the last NaN."""
    _, element_at = _windows(x, axes, lambda at, valid, _i: (at, valid))
    dtype, n = compute_dtype(x.dtype), len(axes)
    plane = x.shape[len(x.shape) - n :]

    def scan(i: tuple[Any, ...]) -> tuple[Any, Any]:
        best, position = m.constant(float("-inf"), dtype), number(_FAR)
        for place in places:
            at, valid = element_at(*i, *place)
            element, known = let(x[at]), best
            better = tirx.any(element > known, m.isnan(element), tirx.EQ(position, number(_FAR)))
            wins = let(tirx.all(*valid, better))
            best = let(m.select(wins, element, known))
            position = let(m.select(wins, flatten(at[len(at) - n :], plane), position))
        return best, position

    y, indices = op.results
    # Narrow in memory: who reads them widens them.
    positions = pointwise(indices.shape, "int32", lambda *i: scan(i)[1])
    return (
        pointwise(y.shape, y.dtype, lambda *i: scan(i)[0]),
        pointwise(indices.shape, "int64", lambda *i: m.cast(positions[i], "int64")),
    )


def _max_pool(op: Lowering, x: Value, axes: Axes) -> tuple[Value, Value]:
    places = _places([axis.width for axis in axes])
    if places is not None:
        return _small_max_pool(op, x, axes, places)
    dtype, n = compute_dtype(x.dtype), len(axes)
    plane = x.shape[len(x.shape) - n :]
    lowest = m.constant(float("-inf"), dtype)

    def read(at: Any, valid: Any, _i: Any) -> Any:
        return _guarded(valid, stored_element(x, at), lowest)

    space, largest = _windows(x, axes, read)
    best = reduce("max", space, _last(space, n), largest, dtype)

    def place(at: Any, valid: Any, i: Any) -> Any:
        element = let(stored_element(x, at))
        flat = let(flatten(at[len(at) - n :], plane))
        is_peak = tirx.EQ(element, best[(*i, *(0,) * n)])
        found = m.select(is_peak, flat, number(_FAR))
        return _guarded(valid, m.select(m.isnan(element), number(-1) - flat, found), number(_FAR))

    # The first place of the maximum, or -1 less the last one of NaN.
    position = reduce("min", space, _last(space, n), _windows(x, axes, place)[1], "int32")
    shape = op.results[0].shape
    nan = m.constant(float("nan"), dtype)
    y = pointwise(
        best.shape, op.results[0].dtype,
        lambda *i: m.select(position[i] < number(0), nan, best[i]),
    )  # fmt: skip

    def index(*i: Any) -> Any:
        found = let(position[i])
        return m.cast(m.select(found < number(0), number(-1) - found, found), "int64")

    indices = pointwise(position.shape, "int64", index)
    return reshape(y, shape), reshape(indices, shape)


def _covering(op: Lowering, axes: Axes, dtype: str, body: Callable[..., Any]) -> Value:
    """Sum `body(place in grad, element)` over the windows that hold each element."""
    result, n = op.results[0], len(axes)
    batch = result.shape[: len(result.shape) - n]

    def element(*i: Any) -> Any:
        elements, whichs = i[len(batch) : len(batch) + n], i[len(batch) + n :]
        found = [axis.window(e, w) for axis, e, w in zip(axes, elements, whichs, strict=True)]
        at = [m.clamp(w, axis.count) for (w, _), axis in zip(found, axes, strict=True)]
        value = body((*i[: len(batch)], *at), elements)
        return _guarded([valid for _, valid in found], value, m.constant(0.0, dtype))

    return _summed(result, [axis.covering for axis in axes], element, lambda total, _i: total)


def _summed(
    result: TensorSpec,
    counts: Sequence[int],
    element: Callable[..., Any],
    finish: Callable[[Any, Index], Any],
) -> Value:
    """Return `finish(sum of element(*i, *place) over a window of counts, i)` at each i."""
    dtype, places = compute_dtype(result.dtype), _places(counts)
    if places is not None:

        def written_out(*i: Any) -> Any:
            total = m.constant(0.0, dtype)
            for place in places:
                total = let(total + element(*i, *place))
            return finish(total, i)

        return pointwise(result.shape, result.dtype, written_out)
    space, n = (*result.shape, *counts), len(counts)
    total = reduce("sum", space, _last(space, n), element, dtype)
    y = pointwise(total.shape, result.dtype, lambda *i: finish(total[i], i[: len(i) - n]))
    return reshape(y, result.shape)


def _max_pool_backward(op: Lowering, grad: Value, indices: Value, axes: Axes) -> Value:
    plane = [axis.extent for axis in axes]
    dtype = compute_dtype(grad.dtype)

    def body(at: Any, elements: Any) -> Any:
        mine = tirx.Cast("int32", indices[at]) == flatten(tuple(elements), plane)
        return m.select(mine, grad[at], m.constant(0.0, dtype))

    return _covering(op, axes, dtype, body)


def _sliding(
    shape: Sequence[int],
    out_shape: Sequence[int],
    *,
    kernel: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1, 1, 1),
    ceil_mode: bool = False,
) -> list[Sliding]:
    """Return the axes of windows with these options of an op; the shapes tell `ceil_mode`."""
    n = len(kernel)
    windows = zip(kernel, strides, padding, dilation[:n], strict=True)
    extents = zip(shape[-n:], out_shape[-n:], strict=True)
    return [Sliding(*extent, *window) for extent, window in zip(extents, windows, strict=True)]


def _adaptive(shape: Sequence[int], out_shape: Sequence[int], n: int) -> list[Adaptive]:
    return [Adaptive.of(*one) for one in zip(shape[-n:], out_shape[-n:], strict=True)]


@lowers("amp_ir.max_pool")
def max_pool(op: Lowering, x: Value, **window: Any) -> tuple[Value, Value]:
    """Compute the maximum of each window, then the first place that has it."""
    return _max_pool(op, x, _sliding(x.shape, op.results[0].shape, **window))


@lowers("amp_ir.max_pool_backward")
def max_pool_backward(
    op: Lowering, grad: Value, indices: Value, *, input_shape: Sequence[int], **window: Any
) -> Value:
    """Add to each element the gradients of the windows whose index names it."""
    return _max_pool_backward(op, grad, indices, _sliding(input_shape, grad.shape, **window))


@lowers("amp_ir.adaptive_max_pool")
def adaptive_max_pool(op: Lowering, x: Value, *, output_size: Sequence[int]) -> Any:
    """Compute the maximum of each window, then the first place that has it."""
    return _max_pool(op, x, _adaptive(x.shape, op.results[0].shape, len(output_size)))


@lowers("amp_ir.adaptive_max_pool_backward")
def adaptive_max_pool_backward(
    op: Lowering, grad: Value, indices: Value, *, input_shape: Sequence[int], ndim_space: int
) -> Value:
    """Add to each element the gradients of the windows whose index names it."""
    axes = _adaptive(input_shape, grad.shape, ndim_space)
    return _max_pool_backward(op, grad, indices, axes)


def _divisor(
    axes: Axes, windows: Sequence[Any], *, with_padding: bool, divisor: int | None, dtype: str
) -> Any:
    """Return the divisor of a window's sum."""
    if divisor is not None:
        return m.constant(divisor, dtype)
    size: Any = None
    for axis, window in zip(axes, windows, strict=True):
        one = (
            axis.end(window) - axis.begin(window)
            if isinstance(axis, Adaptive)
            else axis.size(window, with_padding=with_padding)
        )
        size = one if size is None else size * one
    return tirx.Cast(dtype, size)


def _average(op: Lowering, x: Value, axes: Axes, **count: Any) -> Value:
    dtype, n = compute_dtype(x.dtype), len(axes)
    zero = m.constant(0.0, dtype)
    _, body = _windows(x, axes, lambda at, valid, _i: _guarded(valid, x[at], zero))

    def mean(total: Any, i: Index) -> Any:
        return total / _divisor(axes, i[len(i) - n :], dtype=dtype, **count)

    return _summed(op.results[0], [axis.width for axis in axes], body, mean)


def _average_backward(op: Lowering, grad: Value, axes: Axes, **count: Any) -> Value:
    dtype, n = compute_dtype(grad.dtype), len(axes)
    return _covering(
        op, axes, dtype,
        lambda at, _elements: grad[at] / _divisor(axes, at[len(at) - n :], dtype=dtype, **count),
    )  # fmt: skip


@lowers("amp_ir.avg_pool")
def avg_pool(
    op: Lowering,
    x: Value,
    *,
    count_include_pad: bool = True,
    divisor: int | None = None,
    **window: Any,
) -> Value:
    """Compute the sum of each window over its count."""
    axes = _sliding(x.shape, op.results[0].shape, **window)
    return _average(op, x, axes, with_padding=count_include_pad, divisor=divisor)


@lowers("amp_ir.avg_pool_backward")
def avg_pool_backward(
    op: Lowering,
    grad: Value,
    *,
    input_shape: Sequence[int],
    count_include_pad: bool = True,
    divisor: int | None = None,
    **window: Any,
) -> Value:
    """Add to each element its share of the gradients of the windows that hold it."""
    axes = _sliding(input_shape, grad.shape, **window)
    return _average_backward(op, grad, axes, with_padding=count_include_pad, divisor=divisor)


@lowers("amp_ir.adaptive_avg_pool")
def adaptive_avg_pool(op: Lowering, x: Value, *, output_size: Sequence[int]) -> Value:
    """Compute the sum of each window over its count."""
    axes = _adaptive(x.shape, op.results[0].shape, len(output_size))
    return _average(op, x, axes, with_padding=False, divisor=None)


@lowers("amp_ir.adaptive_avg_pool_backward")
def adaptive_avg_pool_backward(
    op: Lowering, grad: Value, *, input_shape: Sequence[int], ndim_space: int
) -> Value:
    """Add to each element its share of the gradients of the windows that hold it."""
    axes = _adaptive(input_shape, grad.shape, ndim_space)
    return _average_backward(op, grad, axes, with_padding=False, divisor=None)
