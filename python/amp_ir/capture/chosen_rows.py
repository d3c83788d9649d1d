# SPDX-License-Identifier: Apache-2.0
"""`x[k] = value` where `k` is an integer tensor without axes, such as the position of a queue.

PyTorch reads the number and writes into a view. A compiled step looks the row up.
"""

from __future__ import annotations

from types import EllipsisType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from amp_ir.capture.constant_values import constant_value
from amp_ir.capture.diagnostics import UnsupportedCall

_GET, _SET = torch.Tensor.__getitem__, torch.Tensor.__setitem__
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8})


def assigned(func: Any, args: tuple[Any, ...]) -> bool:
    """Assign where a call assigns by such an index, and return whether it does.

    Raises:
        UnsupportedCall: such a row is read, which is a view in PyTorch: later writes show in it.
    """
    if func not in (_GET, _SET) or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    x, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    at = _place_of_tensor(index)
    if at is None:
        return False
    axis = _axis(index, at, x.ndim)
    if func is _GET:
        raise UnsupportedCall(
            "reads x[k], where k is a tensor without axes, as a view that the number in k decides",
            f"Take a copy: x.index_select({axis}, k.reshape(1)).squeeze({axis})",
        )
    viewed = x[(*index[:at], slice(None), *index[at + 1 :])]
    value = args[2]
    if isinstance(value, torch.Tensor):
        shape = (*viewed.shape[:axis], *viewed.shape[axis + 1 :])
        while value.ndim > len(shape) and value.shape[0] == 1:
            value = value[0]
        value = value.expand(shape).unsqueeze(axis).to(x.dtype)
    viewed[(*[slice(None)] * axis, index[at].reshape(1).long())] = value
    return True


def _place_of_tensor(index: tuple[Any, ...]) -> int | None:
    """Return where an index has its one tensor, whose number does not exist yet; else None."""
    places = [at for at, one in enumerate(index) if isinstance(one, FakeTensor)]
    rest = [one for one in index if not isinstance(one, FakeTensor)]
    is_plain = all(
        one is None or (isinstance(one, (int, slice, EllipsisType)) and not isinstance(one, bool))
        for one in rest
    )
    if len(places) != 1 or not is_plain:
        return None
    one = index[places[0]]
    if one.ndim or one.dtype not in _INTEGERS or constant_value(one) is not None:
        return None
    return places[0]


def _axis(index: tuple[Any, ...], at: int, ndim: int) -> int:
    """Return the axis of the result that a slice in the tensor's place would make."""
    taken = sum(1 for one in index if one is not None and one is not Ellipsis)
    return sum(
        ndim - taken if one is Ellipsis else 0 if isinstance(one, int) else 1 for one in index[:at]
    )
