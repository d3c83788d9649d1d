# SPDX-License-Identifier: Apache-2.0
"""Calls that compute each row of x[mask], f[count, *rest], by itself.

They are made on the whole tensor, f[*mask.shape, *rest], whose last axes are those of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

ELEMENTWISE = frozenset(
    "add radd iadd sub rsub isub subtract mul rmul imul multiply div rdiv truediv rtruediv "
    "itruediv divide true_divide pow rpow ipow neg negative abs exp expm1 log log1p log2 sqrt "
    "rsqrt square reciprocal sigmoid tanh relu gelu silu softplus logsigmoid leaky_relu elu "
    "sin cos erf sign clamp clip clamp_min clamp_max minimum maximum detach float double half "
    "bfloat16 eq ne lt le gt ge logical_and logical_or logical_not invert and or "
    "mish hardswish hardsigmoid hardtanh relu6 selu celu softsign tanhshrink clone contiguous to "
    "zeros_like ones_like masked_fill nan_to_num isnan isinf isfinite where long int bool".split()
)
# Among [count, *rest], where each has the axis that it works along: its place, and its default.
_ALONG: Mapping[str, tuple[int, int | None]] = {
    "softmax": (1, None), "log_softmax": (1, None), "sum": (1, None), "mean": (1, None),
    "amax": (1, None), "amin": (1, None), "argmax": (1, None), "argmin": (1, None),
    "max": (1, None), "min": (1, None), "logsumexp": (1, None), "var": (1, None),
    "std": (1, None), "norm": (2, None), "cumsum": (1, None), "glu": (1, -1),
    "chunk": (2, None), "split": (2, None), "normalize": (2, 1), "squeeze": (1, None),
}  # fmt: skip
# Below it, the slope of a row of equal numbers is not far from infinite.
_LEAST_EPS = 1e-20


def is_filled(name: str) -> bool:
    """Return whether a call has parameters, whose gradients add up those of all rows.

    Its argument must be finite in what is not selected, and its result have no gradient there.
    """
    return name in _OF_PARAMETERS


def call_by_row(
    func: Any, name: str, rest: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Make a call whose first argument is whole; NotImplemented where rows might meet.

    `rest` is the number of axes of a row.
    """
    if name in _OF_PARAMETERS:
        return _OF_PARAMETERS[name](rest, *args, **kwargs)
    if any(isinstance(one, torch.Tensor) for one in (*args[1:], *kwargs.values())):
        return NotImplemented
    if name in _ALONG:
        return _along(func, *_ALONG[name], rest, args, kwargs)
    return _OF_SHAPES[name](rest, *args, **kwargs) if name in _OF_SHAPES else NotImplemented


def inner_axis(dim: Any, rest: int) -> int | None:
    """Return an axis of [count, *rest] as one counted from the end; None if it is no row's."""
    if type(dim) is not int:
        return None
    dim = dim - rest - 1 if dim > 0 else dim
    return dim if -rest <= dim < 0 else None


def inner_index(index: Any, rest: int, axes: int) -> tuple[Any, ...] | None:
    """Return an index of [count, *rest] as one of a whole with `axes` for the count.

    None where it takes anything but all of the count.
    """
    index = index if isinstance(index, tuple) else (index,)
    if not index or any(not _is_basic(one) for one in index):
        return None
    if index[0] is Ellipsis:
        taken = sum(1 for one in index[1:] if one is not None)
        return index if taken <= rest else None
    is_all = isinstance(index[0], slice) and index[0] == slice(None)
    return (*[slice(None)] * axes, *index[1:]) if is_all else None


def _is_basic(one: object) -> bool:
    return one is None or one is Ellipsis or type(one) in (int, slice)


def _along(
    func: Any, at: int, default: int | None, rest: int, args: tuple[Any, ...], kwargs: Any
) -> Any:
    options = dict(kwargs)
    given = options.pop("dim", args[at] if len(args) > at else default)
    dims = [inner_axis(one, rest) for one in (given if type(given) in (tuple, list) else [given])]
    if not dims or None in dims:
        return NotImplemented
    dim = dims[0] if type(given) is int else tuple(dims)
    if len(args) > at:
        return func(*args[:at], dim, *args[at + 1 :], **options)
    return func(*args, dim=dim, **options)


def _linear(
    rest: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Any:
    return F.linear(x, weight, bias) if rest > 0 and weight.ndim == 2 else NotImplemented


def _matmul(rest: int, x: torch.Tensor, other: torch.Tensor) -> Any:
    return torch.matmul(x, other) if rest > 0 and other.ndim in (1, 2) else NotImplemented


def _layer_norm(
    rest: int,
    x: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    if len(normalized_shape) > rest or not eps >= _LEAST_EPS:
        return NotImplemented
    return F.layer_norm(x, normalized_shape, weight, bias, eps)


def _rms_norm(
    rest: int,
    x: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Any:
    is_of_rows = len(normalized_shape) <= rest
    return F.rms_norm(x, normalized_shape, weight, eps) if is_of_rows else NotImplemented


def _embedding(rest: int, ids: torch.Tensor, weight: torch.Tensor, **options: Any) -> Any:
    if any(options.pop(name, None) for name in ("max_norm", "scale_grad_by_freq", "sparse")):
        return NotImplemented
    return F.embedding(ids, weight, **options)


_OF_PARAMETERS: Mapping[str, Callable[..., Any]] = {
    "linear": _linear, "matmul": _matmul, "mm": _matmul, "layer_norm": _layer_norm,
    "rms_norm": _rms_norm, "embedding": _embedding,
}  # fmt: skip


def _unsqueeze(rest: int, x: torch.Tensor, dim: int) -> Any:
    axis = inner_axis(dim, rest + 1)
    return NotImplemented if axis is None else x.unsqueeze(axis)


def _reshape(rest: int, x: torch.Tensor, *shape: Any) -> Any:
    (first, *row) = shape[0] if len(shape) == 1 and type(shape[0]) in (tuple, list) else shape
    extents = x.shape[x.ndim - rest :]
    if any(type(one) is not int for one in (first, *row)) or first != -1 or min(row, default=1) < 1:
        return NotImplemented
    if math.prod(row) != extents.numel():
        return NotImplemented
    return x.reshape(*x.shape[: x.ndim - rest], *row)


def _flatten(rest: int, x: torch.Tensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    first, last = inner_axis(start_dim, rest), inner_axis(end_dim, rest)
    return NotImplemented if first is None or last is None else x.flatten(first, last)


_OF_SHAPES: Mapping[str, Callable[..., Any]] = {
    "unsqueeze": _unsqueeze, "view": _reshape, "reshape": _reshape, "flatten": _flatten,
}  # fmt: skip
