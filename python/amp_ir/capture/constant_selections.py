# SPDX-License-Identifier: Apache-2.0
"""Ops whose shapes their data decides, of data that depends on no input of the step.

Tensors from outside of the step count, and are guards then.

`sim[~torch.eye(n, dtype=torch.bool)]` selects as many elements at every call. What such an op
returns becomes a constant of the step; a mask becomes the positions that it selects.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from amp_ir.capture.constant_values import constant_value, outside_value

aten = torch.ops.aten
# The second argument is a mask, or a list of indices, some of which are masks.
_SELECTS = (aten.masked_select.default, aten.index.Tensor)
_MASKS = (torch.bool, torch.uint8)


def select_by_constants(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what the op returns where no input decides its shapes; None where one does."""
    if func in _SELECTS:
        x, masks = args[:2]
        if func is aten.masked_select.default:
            x, mask = torch.broadcast_tensors(x, masks)
            masks = [mask]
        indices = _positions(masks)
        return None if indices is None else aten.index.Tensor(x, indices)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    values = [_value(one) if isinstance(one, torch.Tensor) else one for one in leaves]
    if any(
        isinstance(one, torch.Tensor) and value is None
        for one, value in zip(leaves, values, strict=True)
    ):
        return None
    with _disable_current_modes(), torch.no_grad():
        args, kwargs = pytree.tree_unflatten(values, spec)
        out = func(*args, **kwargs)
    return pytree.tree_map_only(torch.Tensor, aten.lift_fresh_copy.default, out)


def _positions(indices: Any) -> list[torch.Tensor | None] | None:
    """Return indices with the positions that each mask selects; None if an input decides them."""
    found: list[torch.Tensor | None] = []
    for one in indices:
        if one is None or one.dtype not in _MASKS:
            found.append(one)
            continue
        mask = _value(one)
        if mask is None:
            return None
        with _disable_current_modes():
            positions = mask.nonzero(as_tuple=True)
        found += [aten.lift_fresh_copy.default(each) for each in positions]
    return found


def _value(tensor: torch.Tensor) -> torch.Tensor | None:
    if not isinstance(tensor, FakeTensor):
        return outside_value(tensor)
    constant: torch.Tensor | None = tensor.constant
    return constant_value(tensor) if constant is None else constant
