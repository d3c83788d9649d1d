# SPDX-License-Identifier: Apache-2.0
"""Lowerings of Relax's ops that move elements, or fill with a number."""

from __future__ import annotations

import itertools
from typing import Any

from tvm import relax, tirx

from amp_ir.ir.image_layout import TO_FIRST, TO_LAST
from amp_ir.loops import math as m
from amp_ir.loops.builders import channels_first, channels_last, pointwise, reshape
from amp_ir.loops.choices import element_of_part
from amp_ir.loops.ir import Value, compute_dtype
from amp_ir.loops.lowering_registry import Lowering, lowers


@lowers("relax.reshape")
def lower_reshape(op: Lowering, x: Value, *_shape: Any) -> Value:
    """Return the same elements under another shape."""
    return reshape(x, op.results[0].shape)


@lowers("relax.permute_dims")
def permute_dims(op: Lowering, x: Value) -> Value:
    """Permute the dimensions."""
    axes = op.call.attrs.axes
    order = [int(a) for a in axes] if axes is not None else list(reversed(range(len(x.shape))))
    shape = op.results[0].shape
    inner = channels_last(x)
    if inner is not None and tuple(order) == TO_LAST:
        return inner
    moved = [n for n in order if x.shape[n] > 1]
    if moved == sorted(moved):
        return reshape(x, shape)
    if tuple(order) == TO_FIRST:
        return channels_first(x)
    source = [order.index(d) for d in range(len(order))]
    return pointwise(shape, x.dtype, lambda *i: x[tuple(i[k] for k in source)], is_view=True)


@lowers("relax.broadcast_to")
def broadcast_to(op: Lowering, x: Value, *_shape: Any) -> Value:
    """Repeat x along new or unit dimensions."""
    return pointwise(op.results[0].shape, x.dtype, lambda *i: x[i], is_view=True)


@lowers("relax.strided_slice")
def strided_slice(op: Lowering, x: Value, *bounds: Any) -> Value:
    """Take every step-th element from begin along some axes; negative begins count from the end."""
    axes, begins, _ends, steps = slice_bounds(op.call)
    begin = {axis % len(x.shape): (b, s) for axis, b, s in zip(axes, begins, steps, strict=True)}
    start = {
        d: (min(max(b + x.shape[d] if b < 0 else b, 0), x.shape[d] - (s < 0)), s)
        for d, (b, s) in begin.items()
    }

    def body(*i: Any) -> Any:
        return x[tuple(
            k * start[d][1] + start[d][0] if d in start else k for d, k in enumerate(i)
        )]  # fmt: skip

    return pointwise(op.results[0].shape, x.dtype, body, is_view=True)


def slice_bounds(call: relax.Call) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return axes, begins, ends and steps of a `relax.strided_slice` with constant bounds."""
    numbers = [[int(field.value) for field in _fields(argument)] for argument in call.args[1:]]
    axes, begins, ends = numbers[0], numbers[1], numbers[2]
    steps = numbers[3] if len(numbers) > 3 and numbers[3] else [1] * len(axes)
    return axes, begins, ends, steps


def _fields(argument: Any) -> list[Any]:
    return list(argument.fields) if isinstance(argument, relax.Tuple) else []


@lowers("relax.flip")
def flip(op: Lowering, x: Value) -> Value:
    """Reverse x along one axis."""
    axis = int(op.call.attrs.axis) % len(x.shape)
    last = x.shape[axis] - 1

    def body(*i: Any) -> Any:
        return x[tuple(last - k if d == axis else k for d, k in enumerate(i))]

    return pointwise(x.shape, x.dtype, body, is_view=True)


@lowers("relax.concat")
def concat(op: Lowering, *parts: Value) -> Value:
    """Concatenate values along an axis."""
    result = op.results[0]
    axis = int(op.call.attrs.axis) % len(result.shape)
    read = [part for part in parts if part.shape[axis]] or list(parts)
    ends = list(itertools.accumulate(part.shape[axis] for part in read))

    def body(*i: Any) -> Any:
        def element(k: int, at: Any) -> Any:
            return read[k][tuple(at if d == axis else j for d, j in enumerate(i))]

        return element_of_part(i[axis], ends, element)

    return pointwise(result.shape, result.dtype, body, parts=tuple(read), part_axis=axis)


@lowers("relax.full", "relax.zeros", "relax.ones")
def full(op: Lowering, *arguments: Any) -> Value:
    """Fill with one number."""
    result = op.results[0]
    fill = next((a for a in arguments if isinstance(a, Value)), None)
    number = {"relax.zeros": 0, "relax.ones": 1}.get(op.name, 0)
    if fill is None:
        literal = m.constant(number, compute_dtype(result.dtype))
        return pointwise(result.shape, result.dtype, lambda *i: literal)
    target = compute_dtype(result.dtype)
    return pointwise(
        result.shape, result.dtype, lambda *i: m.cast(fill[()], target), is_view=True
    )  # fmt: skip


@lowers("relax.arange")
def arange(op: Lowering, start: Any, _end: Any, step: Any) -> Value:
    """Return start, start + step, ..."""
    result = op.results[0]
    first, by = _number(start), _number(step)
    target = compute_dtype(result.dtype)

    def body(i: Any) -> Any:
        at = tirx.Cast(target, i) if target != "int32" else i
        return at * m.constant(by, target) + m.constant(first, target)

    return pointwise(result.shape, result.dtype, body)


def _number(argument: Any) -> float | int:
    value = getattr(argument, "value", argument)
    return getattr(value, "value", value)


@lowers("relax.tril", "relax.triu")
def triangle(op: Lowering, x: Value, k: Any) -> Value:
    """Keep the part on and below (tril) or above (triu) the k-th diagonal; zero elsewhere."""
    offset = int(_number(k))
    is_lower = op.name == "relax.tril"

    def body(*i: Any) -> Any:
        element = x[i]
        difference = i[-1] - i[-2]
        bound = tirx.const(offset, "int32")
        kept = difference <= bound if is_lower else difference >= bound
        return m.select(kept, element, m.constant(0, m.dtype_of(element)))

    return pointwise(x.shape, op.results[0].dtype, body)
