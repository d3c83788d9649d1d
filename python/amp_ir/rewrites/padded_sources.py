# SPDX-License-Identifier: Apache-2.0
"""What has to be padded, and how, so that the result of an op is: one rule an op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
from tvm import relax

from amp_ir.dialect.registry import options_of
from amp_ir.ir.dataflow import op_name
from amp_ir.ir.elementwise_ops import is_elementwise
from amp_ir.ir.static_shape import shape_of
from amp_ir.ir.strided_view import permutation

TRANSPOSE = "relax.permute_dims"
TABLE = "amp_ir.embedding_backward"
CASTS = ("amp_ir.cast", "relax.astype")

Shape = tuple[int, ...]


@attrs.define
class Wanted:
    """The padded shape of a value, and whether its padding must be zeros."""

    shape: Shape
    is_zero: bool


def sources_of(call: relax.Call, wanted: Wanted) -> list[tuple[Any, Wanted]] | None:
    """Return what has to be padded, and how, for the result of an op to be; None: nothing does."""
    rule = SOURCES.get(op_name(call), _of_elementwise if is_elementwise(call) else None)
    return None if rule is None else rule(call, wanted)


Sources = Callable[[relax.Call, Wanted], "list[tuple[Any, Wanted]] | None"]


def _tensors(call: relax.Call) -> Iterator[relax.Expr]:
    for one in call.args:
        if isinstance(one.ty, relax.TensorType) and shape_of(one):
            yield one


def _of_elementwise(call: relax.Call, wanted: Wanted) -> list[tuple[Any, Wanted]]:
    is_zero = wanted.is_zero and op_name(call) in CASTS
    found = []
    for one in _tensors(call):
        own = shape_of(one)
        tail = wanted.shape[len(wanted.shape) - len(own) :]
        shape = tuple(n if n == 1 else p for n, p in zip(own, tail, strict=True))
        found.append((one, Wanted(shape, is_zero)))
    return found


def _of_reshape(call: relax.Call, wanted: Wanted) -> list[tuple[Any, Wanted]] | None:
    own, source = shape_of(call), shape_of(call.args[0])
    if wanted.shape[:-1] != own[:-1] or source[-1:] != own[-1:]:
        return None
    return [(call.args[0], Wanted((*source[:-1], wanted.shape[-1]), wanted.is_zero))]


def _of_permute_dims(call: relax.Call, wanted: Wanted) -> list[tuple[Any, Wanted]]:
    order = permutation(call)
    shape = tuple(wanted.shape[order.index(d)] for d in range(len(order)))
    return [(call.args[0], Wanted(shape, wanted.is_zero))]


def _of_log_softmax(call: relax.Call, wanted: Wanted) -> list[tuple[Any, Wanted]] | None:
    own = shape_of(call)
    is_along = int(call.attrs.axis) % len(own) == len(own) - 1
    return _along_last(call, wanted, call.args[:1]) if is_along else None


def _of_log_softmax_backward(call: relax.Call, wanted: Wanted) -> list[tuple[Any, Wanted]] | None:
    own = shape_of(call)
    if options_of(call)["axis"] % len(own) != len(own) - 1:
        return None
    found = _along_last(call, wanted, call.args[:])
    if found is not None:
        # The gradient is added up along the row.
        found[0] = (call.args[0], Wanted(wanted.shape, True))
    return found


def _along_last(
    call: relax.Call, wanted: Wanted, arguments: Sequence[relax.Expr]
) -> list[tuple[Any, Wanted]] | None:
    if wanted.shape[:-1] != shape_of(call)[:-1]:
        return None
    return [(one, Wanted(wanted.shape, False)) for one in arguments]


def _of_nll_loss_backward(call: relax.Call, wanted: Wanted) -> list[tuple[Any, Wanted]] | None:
    own = shape_of(call)
    return [] if len(own) == 2 and wanted.shape[0] == own[0] else None


def _of_table(call: relax.Call, wanted: Wanted) -> list[tuple[Any, Wanted]] | None:
    return [] if wanted.shape[1:] == shape_of(call)[1:] else None


def _of_full(call: relax.Call, wanted: Wanted) -> list[tuple[Any, Wanted]]:
    return []


def _of_concat(call: relax.Call, wanted: Wanted) -> list[tuple[Any, Wanted]] | None:
    axis = int(call.attrs.axis) % len(wanted.shape)
    if wanted.shape[axis] != shape_of(call)[axis] or not isinstance(call.args[0], relax.Tuple):
        return None
    found = []
    for part in call.args[0].fields:
        shape = list(wanted.shape)
        shape[axis] = shape_of(part)[axis]
        found.append((part, Wanted(tuple(shape), wanted.is_zero)))
    return found


def _of_slice(call: relax.Call, wanted: Wanted) -> list[tuple[Any, Wanted]] | None:
    source, own = shape_of(call.args[0]), shape_of(call)
    axes = {int(one.value) % len(own) for one in call.args[1].fields}
    grown = {d for d, (n, p) in enumerate(zip(own, wanted.shape, strict=True)) if n != p}
    if axes & grown:
        return None
    shape = tuple(
        p if d in grown else n for d, (n, p) in enumerate(zip(source, wanted.shape, strict=True))
    )
    return [(call.args[0], Wanted(shape, wanted.is_zero))]


MOVES = ("relax.reshape", TRANSPOSE, "relax.concat", "relax.strided_slice")
SOURCES: dict[str, Sources] = {
    "relax.reshape": _of_reshape,
    TRANSPOSE: _of_permute_dims,
    "relax.concat": _of_concat,
    "relax.strided_slice": _of_slice,
    "relax.full": _of_full,
    "relax.nn.log_softmax": _of_log_softmax,
    "amp_ir.log_softmax_backward": _of_log_softmax_backward,
    TABLE: _of_table,
    "amp_ir.nll_loss_backward": _of_nll_loss_backward,
}
VIEWS = (TRANSPOSE, "relax.reshape")
