# SPDX-License-Identifier: Apache-2.0
"""Builders of loop values: each runs a body once on index variables to learn what it reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from tvm import tirx

from amp_ir.ir.image_layout import TO_FIRST, TO_LAST, moved
from amp_ir.loops.body_context import reading
from amp_ir.loops.ir import (
    Constant,
    Element,
    Index,
    Opaque,
    OpaqueKernel,
    Pointwise,
    Read,
    ReduceKind,
    Reduction,
    TensorSpec,
    Value,
    compute_dtype,
)
from amp_ir.loops.read_places import is_scattered, order_of_memory, place_of


def channels_last(value: Value) -> Value | None:
    """Return the tensor in memory of which `value` is the view with channels first, or None.

    A value computed from such a view has its channels last in memory too (`pointwise`, `reduce`),
    so that chains between convolutions never change their layout.
    """
    return value.last if isinstance(value, Pointwise) else None


def are_channels_last(*images: Value) -> bool:
    """Return whether one of these images has its channels last in memory."""
    return any(channels_last(one) is not None for one in images)


def with_channels_last(image: Value) -> Value:
    """Return an image [n, c, h, w] as [n, h, w, c]: what is in memory, or a view."""
    inner = channels_last(image)
    if inner is not None:
        return inner
    shape = moved(image.shape, TO_LAST)
    return pointwise(shape, image.dtype, lambda n, h, w, c: image[n, c, h, w], is_view=True)


def channels_first(value: Value) -> Value:
    """Return the channels-first view of a channels-last tensor; never costs a kernel."""
    spec = TensorSpec(moved(value.shape, TO_FIRST), value.dtype)

    def body(*index: Any) -> Any:
        return value[moved(index, TO_LAST)]

    read = Read(value, "other", is_scattered=True)
    return Pointwise(spec, [read], body=body, is_view=True, last=value)


def pointwise(shape: Sequence[int], dtype: str, body: Element, **flags: Any) -> Pointwise:
    """Return a value of `shape` with element `body(*i)` at `i`, rounded to `dtype` when stored."""
    spec = TensorSpec(tuple(int(n) for n in shape), dtype)
    reads, reads_last = _reads_of(spec.shape, body, spec.shape)
    if not reads_last:
        return Pointwise(spec, reads, body=body, **flags)
    inner = TensorSpec(moved(spec.shape, TO_LAST), dtype)
    if flags.get("parts"):
        flags["parts"] = tuple(with_channels_last(part) for part in flags["parts"])
        flags["part_axis"] = TO_LAST.index(flags["part_axis"])

    def body_of_last(*index: Any) -> Any:
        return body(*moved(index, TO_FIRST))

    reads, _ = _reads_of(inner.shape, body_of_last, inner.shape)
    first = channels_first(Pointwise(inner, reads, body=body_of_last, **flags))
    assert isinstance(first, Pointwise)
    return first


def elementwise(
    shape: Sequence[int], dtype: str, arguments: Sequence[Value], body: Element, **flags: Any
) -> Pointwise:
    """Return `pointwise` of a body that reads each of `arguments` at its own index only.

    The shapes then determine what it reads, and the body, whose arithmetic may be long, need not
    run to find out.
    """
    spec = TensorSpec(tuple(int(n) for n in shape), dtype)
    for one in arguments:
        if channels_last(one) is not None or len(one.shape) > len(spec.shape):
            return pointwise(shape, dtype, body, **flags)
    reads = {id(one): Read(one, _own_place(one, spec)) for one in arguments}
    return Pointwise(spec, list(reads.values()), body=body, **flags)


def _own_place(value: Value, spec: TensorSpec) -> Literal["same", "broadcast"]:
    return "same" if value.shape == spec.shape else "broadcast"


def reduce(
    kind: ReduceKind,
    source_shape: Sequence[int],
    axes: Sequence[int],
    body: Element,
    dtype: str,
    **flags: Any,
) -> Value:
    """Reduce `body(*i)` by `kind` over `axes` of the space `source_shape`; extents stay as 1.

    `flags` are `is_gate` and `divisor`: see `Reduction`.
    """
    source = tuple(int(n) for n in source_shape)
    kept = tuple(sorted(axis % len(source) for axis in axes)) if source else ()
    reads, reads_last = _reads_of(source, body, None)
    order = None
    if not reads_last and any(map(_may_be_scattered, reads)):
        order = order_of_memory(source, kept, body)
    if order is not None:
        return _reordered(kind, (source, kept, body), order, dtype, flags)
    if not reads_last:
        return _reduction(kind, source, kept, (body, reads), dtype, flags)

    def body_of_last(*index: Any) -> Any:
        return body(*moved(index, TO_FIRST))

    source, kept = moved(source, TO_LAST), tuple(sorted(TO_FIRST[axis] for axis in kept))
    reads, _ = _reads_of(source, body_of_last, None)
    return channels_first(_reduction(kind, source, kept, (body_of_last, reads), dtype, flags))


def _may_be_scattered(read: Read) -> bool:
    """Return whether neighbours may read elements that are none in memory, as a transpose does."""
    value = read.value
    is_moved = isinstance(value, Pointwise) and value.is_view and not value.is_reshape
    return read.is_scattered or is_moved


def _reordered(
    kind: ReduceKind,
    space: tuple[tuple[int, ...], tuple[int, ...], Element],
    order: tuple[int, ...],
    dtype: str,
    flags: dict[str, Any],
) -> Value:
    """Return the reduction with the dimensions of its space in another order."""
    source, axes, body = space
    shape = tuple(source[d] for d in order)

    def body_in_order(*index: Any) -> Any:
        at = dict(zip(order, index, strict=True))
        return body(*(at[d] for d in range(len(source))))

    reads, _ = _reads_of(shape, body_in_order, None)
    kept = tuple(order.index(axis) for axis in axes)
    found = _reduction(kind, shape, tuple(sorted(kept)), (body_in_order, reads), dtype, flags)
    # Of what is kept only ones have moved.
    return reshape(found, tuple(1 if d in axes else n for d, n in enumerate(source)))


def _reduction(
    kind: ReduceKind,
    source: tuple[int, ...],
    axes: tuple[int, ...],
    body: tuple[Element, list[Read]],
    dtype: str,
    flags: dict[str, Any],
) -> Reduction:
    shape = tuple(1 if d in axes else n for d, n in enumerate(source))
    return Reduction(
        TensorSpec(shape, dtype), body[1], kind=kind,
        source_shape=source, axes=axes, body=body[0], **flags,
    )  # fmt: skip


def reshape(source: Value, shape: Sequence[int]) -> Value:
    """Return the same elements in the same order under another shape; never costs a kernel."""
    spec = TensorSpec(tuple(int(n) for n in shape), source.dtype)
    assert spec.size == source.size, f"{source.shape} to {spec.shape}"
    if spec.shape == source.shape:
        return source
    inner = channels_last(source)
    if inner is not None and 1 in (source.shape[1], math.prod(source.shape[2:])):
        # One channel, or one pixel: the flat order is the same.
        return reshape(inner, spec.shape)

    only_ones_differ = _without_ones(spec.shape) == _without_ones(source.shape)

    def body(*index: Any) -> Any:
        if only_ones_differ:  # without divisions, through which no loop sees that it reads vectors
            kept = iter([i for i, n in zip(index, spec.shape, strict=True) if n != 1])
            return source[tuple(0 if n == 1 else next(kept) for n in source.shape)]
        return source[unflatten(flatten(index, spec.shape), source.shape)]

    return Pointwise(spec, [Read(source, "flat")], body=body, is_reshape=True, is_view=True)


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [n for n in shape if n != 1]


def squeeze(source: Value, shape: Sequence[int]) -> Value:
    """Drop extents of 1, as after a reduction without `keepdims`."""
    return reshape(source, shape)


def opaque(
    name: str,
    inputs: Sequence[Value],
    specs: Sequence[TensorSpec],
    emit: Callable[[list[Any], list[Any]], tirx.Stmt],
    inplace: tuple[tuple[int, int], ...] = (),
    emit_cuda: Callable[[list[Any], list[Any]], list[tirx.Stmt]] | None = None,
) -> tuple[Opaque, ...]:
    """Return the results of a kernel written out as TIR; see `OpaqueKernel`.

    Its buffers widen what they load, so an input that only widens another value is replaced by it.
    """
    inputs = [_before_widening(value) for value in inputs]
    kernel = OpaqueKernel(name, inputs, list(specs), emit, inplace, emit_cuda)
    reads = [Read(value, "other") for value in inputs]
    return tuple(
        Opaque(spec, list(reads), kernel=kernel, position=k) for k, spec in enumerate(specs)
    )


def _before_widening(value: Value) -> Value:
    while isinstance(value, Pointwise) and value.is_cast and value.is_view:
        value = value.reads[0].value
    return value


def flatten(index: Index, shape: Sequence[int]) -> Any:
    """Return the row-major flat position of `index` in a tensor of `shape`."""
    flat: Any = 0
    for i, n in zip(index, shape, strict=True):
        flat = i if isinstance(flat, int) and flat == 0 else flat * n + i
    return flat


def unflatten(flat: Any, shape: Sequence[int]) -> Index:
    """Return the index whose row-major flat position in a tensor of `shape` is `flat`."""
    index: list[Any] = []
    for d in reversed(range(len(shape))):
        if shape[d] == 1:
            index.append(0)
        elif d == 0 or all(n == 1 for n in shape[:d]):
            index.append(flat)
        elif isinstance(flat, int):  # a number at compile time, which TVM's functions do not take
            flat, at = divmod(flat, shape[d])
            index.append(at)
        else:
            index.append(tirx.floormod(flat, shape[d]))
            flat = tirx.floordiv(flat, shape[d])
    return tuple(reversed(index))


def _reads_of(
    shape: tuple[int, ...], body: Element, own_shape: tuple[int, ...] | None
) -> tuple[list[Read], bool]:
    """Run `body` once on fresh index variables and record what it reads, and where.

    Also record whether it reads images whose channels are last in memory, and makes one.
    """
    index = tuple(tirx.Var(f"i{d}", "int32") for d in range(len(shape)))
    reads: dict[int, Read] = {}
    reads_last = False

    def note(value: Value, at: Index) -> Any:
        nonlocal reads_last
        inner = channels_last(value)
        if inner is not None:
            reads_last = True
            return note(inner, moved(at, TO_LAST))
        place = place_of(value, at, index, shape)
        gathers = place == "other" and is_scattered(at, index)
        known = reads.get(id(value))
        if known is None or (known.place in ("same", "broadcast") and known.place != place):
            reads[id(value)] = Read(value, place, gathers)
        elif gathers:
            reads[id(value)] = Read(value, known.place, gathers)
        return dummy_element(value)

    with reading(note):
        body(*index)
    return list(reads.values()), reads_last and len(shape) == len(TO_LAST)


def dummy_element(value: Value) -> Any:
    """Return an expression of the compute dtype of `value`, for dry runs of a body."""
    if isinstance(value, Constant):
        return tirx.const(value.number, compute_dtype(value.dtype))
    return tirx.Var("element", compute_dtype(value.dtype))
