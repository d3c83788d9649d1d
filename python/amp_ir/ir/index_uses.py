# SPDX-License-Identifier: Apache-2.0
"""Ops that read or write by an index: op -> (index argument, axis extent, allowed range).

Kernels clamp what is out of range, so that no access is out of bounds;
`rewrites/check_indices.py`, which reads this table as the interpreter does, refuses a step with
such an index or rolls it back. An op that takes integer tensors is here or in NEVER_OUT_OF_RANGE.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
from tvm import relax

from amp_ir.dialect.loop import CARRIED, Loop, loop_of
from amp_ir.dialect.loop import NAME as LOOP
from amp_ir.dialect.losses import class_axis
from amp_ir.dialect.registry import options_of
from amp_ir.ir.dataflow import Dataflow, op_name
from amp_ir.ir.index_check import USERS_CHECK, IndexCheck, LengthCheck, UsersCheck
from amp_ir.ir.location import from_span
from amp_ir.ir.static_shape import shape_of


@attrs.frozen(eq=False)
class IndexUse:
    """Argument `position` of a call holds indices that `check` is about."""

    position: int
    check: IndexCheck


_Uses = list[tuple[int, int, int, "int | None"]]


def index_uses(call: relax.Call) -> list[IndexUse]:
    """Return the arguments of a call that hold indices; none for other ops.

    Those of a loop are the operands that its steps use so, all entries at once.
    """
    name = op_name(call)
    if name == LOOP:
        return [use for use in uses_in_body(loop_of(call)) if use is not None]
    rule = INDEX_USES.get(name)
    if rule is None:
        return []
    place = from_span(call.span)
    if name == "amp_ir.checked_lengths":
        message = str(options_of(call)["message"])
        kind = UsersCheck if message.startswith(USERS_CHECK) else LengthCheck
        return [
            IndexUse(position, kind(name, place, least, extent, ignored, message))
            for position, least, extent, ignored in rule(call)
        ]
    return [
        IndexUse(position, IndexCheck(name, place, least, extent, ignored))
        for position, least, extent, ignored in rule(call)
    ]


def uses_in_body(loop: Loop) -> list[IndexUse | None]:
    """Return the uses of indices in a loop's body, by operand; None for a computed index."""
    flow = Dataflow(loop.body)
    operands = {parameter: k for k, parameter in enumerate(flow.main.params)}
    found: list[IndexUse | None] = []
    for value in flow.values.values():
        for use in index_uses(value) if isinstance(value, relax.Call) else ():
            source = value.args[use.position]
            while _is_view(flow.values.get(source)):
                source = flow.values[source].args[0]
            at = operands.get(source)
            is_given = at is not None and loop.inputs[at][0] != CARRIED
            found.append(IndexUse(at, use.check) if at is not None and is_given else None)
    return found


def _is_view(value: relax.Expr | None) -> bool:
    """Return whether each element of a value is one of its argument, and none is lost."""
    if op_name(value) in ("relax.astype", "amp_ir.cast"):
        dtypes = (str(value.args[0].ty.dtype), str(value.ty.dtype))  # type: ignore[union-attr]
        return dtypes == ("int32", "int64") or dtypes[0] == dtypes[1]
    return op_name(value) in ("relax.reshape", "relax.permute_dims", "relax.broadcast_to")


def _rows(call: relax.Call) -> _Uses:
    """Return the indices of table rows, counted from 0: as `F.embedding`."""
    return [(1, 0, shape_of(call.args[0])[0], None)]


def _table_gradient(call: relax.Call) -> _Uses:
    return [(1, 0, int(options_of(call)["num_embeddings"]), None)]


def _places(first: int) -> Callable[[relax.Call], _Uses]:
    """Return index tensors from argument `first` on, one per axis of x; negative ones may wrap."""

    def rule(call: relax.Call) -> _Uses:
        options, shape = options_of(call), shape_of(call.args[0])
        extents = [shape[axis] for axis in options["axes"]]
        least = [-extent if options["wraps"] else 0 for extent in extents]
        return [(first + k, least[k], extent, None) for k, extent in enumerate(extents)]

    return rule


def _along_axis(call: relax.Call) -> _Uses:
    """Return positions along one axis, counted from 0: as `gather` and `scatter`."""
    options = options_of(call)
    axis = options["axis"] if options else call.attrs.axis
    return [(1, 0, shape_of(call.args[0])[int(axis)], None)]


def _take(call: relax.Call) -> _Uses:
    """Return positions from either end, as in Relax; converters take at known positions."""
    shape, axis = shape_of(call.args[0]), call.attrs.axis
    extent = math.prod(shape) if axis is None else shape[int(axis)]
    return [(1, -extent, extent, None)]


def _nll_loss(call: relax.Call) -> _Uses:
    shape = shape_of(call.args[0])
    return [(1, 0, shape[class_axis(shape)], int(options_of(call)["ignore_index"]))]


def _nll_loss_backward(call: relax.Call) -> _Uses:
    options = options_of(call)
    shape = tuple(options["input_shape"])
    return [(1, 0, shape[class_axis(shape)], int(options["ignore_index"]))]


def _lengths(call: relax.Call) -> _Uses:
    options = options_of(call)
    return [(1, int(options["least"]), int(options["extent"]), None)]


INDEX_USES: dict[str, Callable[[relax.Call], _Uses]] = {
    "amp_ir.embedding": _rows,
    "amp_ir.embedding_backward": _table_gradient,
    "amp_ir.checked_lengths": _lengths,
    "amp_ir.index": _places(1),
    "amp_ir.index_put": _places(2),
    "amp_ir.scatter_add": _along_axis,
    "amp_ir.nll_loss": _nll_loss,
    "amp_ir.nll_loss_backward": _nll_loss_backward,
    "relax.gather_elements": _along_axis,
    "relax.scatter_elements": _along_axis,
    "relax.take": _take,
}

_OF_POOL = "the indices are those that the forward pooling of the same step found"
_HASHED = "the integers are the seed and the number of the step, which are hashed"
_NUMBERS = "integers are numbers in it, not places"
_STATIC = "elements move by places that are known at the capture"

# Ops that take integer tensors and cannot be given an index out of range -> why.
NEVER_OUT_OF_RANGE: dict[str, str] = {
    "amp_ir.max_pool_backward": _OF_POOL,
    "amp_ir.adaptive_max_pool_backward": _OF_POOL,
    "amp_ir.update_scale": "the integers are counters of steps",
    "amp_ir.cast": _NUMBERS,
    **{
        f"amp_ir.{name}": _HASHED
        for name in (
            "random_uniform random_normal dropout attention attention_backward "
            "attention_probabilities attention_weights attention_score_gradient"
        ).split()
    },
    **{
        f"relax.{name}": _NUMBERS
        for name in (
            "abs exp log sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
            "sigmoid erf floor ceil round trunc sign square logical_not bitwise_not isfinite isinf "
            "isnan add subtract multiply divide floor_divide mod floor_mod power maximum minimum "
            "less less_equal greater greater_equal equal not_equal logical_and logical_or "
            "logical_xor bitwise_and bitwise_or bitwise_xor left_shift right_shift negative where "
            "astype matmul nn.relu nn.gelu nn.gelu_tanh nn.silu nn.leakyrelu nn.softmax "
            "nn.log_softmax sum mean max min prod argmax argmin cumsum cumprod sort argsort topk "
            "full zeros ones arange"
        ).split()
    },
    **{
        f"relax.{name}": _STATIC
        for name in "reshape permute_dims broadcast_to concat strided_slice flip tril triu".split()
    },
}
