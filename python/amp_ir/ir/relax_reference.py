# SPDX-License-Identifier: Apache-2.0
"""Reference implementation of each Relax op of a step in PyTorch: one table, name -> function.

An entry takes the attributes of the call and the values of its arguments (a tuple argument is a
tuple of tensors, a shape a tuple of ints) and returns the result, or a tuple of results. Arguments
are float32 or wider; the caller (`interpreter.py`) rounds to the declared dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _axes(attributes: Any, x: torch.Tensor) -> tuple[int, ...]:
    return (
        tuple(range(x.ndim)) if attributes.axis is None else tuple(int(a) for a in attributes.axis)
    )


def _reduction(
    function: Callable[..., torch.Tensor],
) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def apply(attributes: Any, x: torch.Tensor) -> torch.Tensor:
        axes = _axes(attributes, x)
        return function(x, axes, keepdim=bool(attributes.keepdims)) if axes else x

    return apply


def _prod(x: torch.Tensor, axes: tuple[int, ...], *, keepdim: bool) -> torch.Tensor:
    for axis in sorted((axis % x.ndim for axis in axes), reverse=True):
        x = x.prod(axis, keepdim=keepdim)
    return x


def _arg_reduction(
    function: Callable[..., torch.Tensor],
) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def apply(attributes: Any, x: torch.Tensor) -> torch.Tensor:
        axis = None if attributes.axis is None else int(attributes.axis)
        return function(x, axis, keepdim=bool(attributes.keepdims))

    return apply


def _scan(function: Callable[..., torch.Tensor], start: float) -> Callable[..., torch.Tensor]:
    def apply(attributes: Any, x: torch.Tensor) -> torch.Tensor:
        x, axis = (x.flatten(), 0) if attributes.axis is None else (x, int(attributes.axis))
        if x.dtype == torch.bool:
            x = x.long()
        if not attributes.exclusive:
            return function(x, axis)
        first = torch.full_like(x.narrow(axis, 0, 1), start)
        return torch.cat([first, function(x, axis).narrow(axis, 0, x.shape[axis] - 1)], axis)

    return apply


def _strided_slice(
    _attrs: Any,
    x: torch.Tensor,
    axes: tuple[int, ...],
    begins: tuple[int, ...],
    ends: tuple[int, ...],
    strides: tuple[int, ...] = (),
) -> torch.Tensor:
    for axis, begin, end, stride in zip(
        axes, begins, ends, strides or (1,) * len(axes), strict=True
    ):
        taken = range(*slice(begin, end, stride).indices(x.shape[axis]))
        x = x.index_select(axis, torch.tensor(taken, dtype=torch.int64))
    return x


def _from_front(x: torch.Tensor, ids: torch.Tensor, axis: int) -> torch.Tensor:
    return torch.where(ids < 0, ids + x.shape[axis], ids).long()


def _take(attributes: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    x, axis = (x.flatten(), 0) if attributes.axis is None else (x, int(attributes.axis) % x.ndim)
    taken = x.index_select(axis, _from_front(x, ids, axis).flatten())
    return taken.reshape(*x.shape[:axis], *ids.shape, *x.shape[axis + 1 :])


def _gather(attributes: Any, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    axis = int(attributes.axis)
    return x.gather(axis, ids.long())


_SCATTER_REDUCTIONS = {"add": "sum", "mul": "prod", "min": "amin", "max": "amax"}


def _scatter(
    attributes: Any, x: torch.Tensor, ids: torch.Tensor, updates: torch.Tensor
) -> torch.Tensor:
    axis, reduction = int(attributes.axis), str(attributes.reduction)
    places = ids.long()
    if reduction == "update":
        return x.scatter(axis, places, updates)
    return x.scatter_reduce(axis, places, updates, _SCATTER_REDUCTIONS[reduction])


def _stable_sort(x: torch.Tensor, axis: int, descending: bool) -> tuple[torch.Tensor, torch.Tensor]:
    values, order = torch.sort(x, dim=int(axis), descending=bool(descending), stable=True)
    return values, order


def _sort(attributes: Any, x: torch.Tensor) -> torch.Tensor:
    return _stable_sort(x, attributes.axis, attributes.descending)[0]


def _argsort(attributes: Any, x: torch.Tensor) -> torch.Tensor:
    return _stable_sort(x, attributes.axis, attributes.descending)[1]


def _topk(attributes: Any, x: torch.Tensor) -> Any:
    # torch.topk leaves the order of equal elements open; a stable sort takes the first ones.
    axis, k = int(attributes.axis), int(attributes.k)
    values, indices = _stable_sort(x, axis, attributes.largest)
    both = values.narrow(axis, 0, k), indices.narrow(axis, 0, k)
    return {"both": both, "values": both[0], "indices": both[1]}[str(attributes.ret_type)]


def _permute(attributes: Any, x: torch.Tensor) -> torch.Tensor:
    axes = range(x.ndim - 1, -1, -1) if attributes.axes is None else attributes.axes
    return x.permute([int(axis) for axis in axes])


def _concat(attributes: Any, *tensors: Any) -> torch.Tensor:
    parts = tensors[0] if isinstance(tensors[0], tuple) else tensors
    return torch.cat(parts, int(attributes.axis))


def _full(_attrs: Any, shape: tuple[int, ...], value: torch.Tensor) -> torch.Tensor:
    return value.expand(shape)


def _pointwise(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda _attrs, *tensors: function(*tensors)


_POINTWISE: dict[str, Callable[..., torch.Tensor]] = {
    "negative": torch.neg,
    "divide": _divide,
    "mod": torch.fmod,
    "floor_mod": torch.remainder,
    "power": torch.pow,
    "equal": torch.eq,
    "not_equal": torch.ne,
    "left_shift": torch.bitwise_left_shift,
    "right_shift": torch.bitwise_right_shift,
    "where": torch.where,
    "astype": lambda x: x,
    "matmul": torch.matmul,
    "nn.relu": torch.relu,
    "nn.gelu": torch.nn.functional.gelu,
    "nn.gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "nn.silu": torch.nn.functional.silu,
    **{
        name: getattr(torch, name)
        for name in (
            "abs exp log sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
            "sigmoid erf floor ceil round trunc sign square logical_not bitwise_not isfinite isinf "
            "isnan add subtract multiply floor_divide maximum minimum less less_equal greater "
            "greater_equal logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor"
        ).split()
    },
}

_OTHERS: dict[str, Callable[..., Any]] = {
    "nn.leakyrelu": lambda a, x: torch.nn.functional.leaky_relu(x, float(a.alpha)),
    "nn.softmax": lambda a, x: torch.softmax(x, int(a.axis)),
    "nn.log_softmax": lambda a, x: torch.log_softmax(x, int(a.axis)),
    "sum": _reduction(torch.sum),
    "mean": _reduction(torch.mean),
    "max": _reduction(torch.amax),
    "min": _reduction(torch.amin),
    "prod": _reduction(_prod),
    "argmax": _arg_reduction(torch.argmax),
    "argmin": _arg_reduction(torch.argmin),
    "cumsum": _scan(torch.cumsum, 0),
    "cumprod": _scan(torch.cumprod, 1),
    "sort": _sort,
    "argsort": _argsort,
    "topk": _topk,
    "reshape": lambda _a, x, shape: x.reshape(shape),
    "permute_dims": _permute,
    "broadcast_to": lambda _a, x, shape: x.expand(shape),
    "concat": _concat,
    "strided_slice": _strided_slice,
    "flip": lambda a, x: x.flip(int(a.axis)),
    "full": _full,
    "zeros": lambda _a, shape: torch.zeros(shape),
    "ones": lambda _a, shape: torch.ones(shape),
    "arange": lambda _a, start, end, step: torch.arange(start, end, step),
    "tril": lambda _a, x, k: torch.tril(x, int(k)),
    "triu": lambda _a, x, k: torch.triu(x, int(k)),
    "take": _take,
    "gather_elements": _gather,
    "scatter_elements": _scatter,
}

RELAX_OPS: dict[str, Callable[..., Any]] = {
    **{f"relax.{name}": _pointwise(function) for name, function in _POINTWISE.items()},
    **{f"relax.{name}": function for name, function in _OTHERS.items()},
}
