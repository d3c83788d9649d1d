# SPDX-License-Identifier: Apache-2.0
"""`torch.tensor([a, b])` of tensors without axes, which reads their values, as a stack of them.

So is `torch.tensor([a.item(), 1.0])`, of numbers that do not exist yet.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from amp_ir.capture.later_number import LaterNumber


def tensor_of_tensors(data: Any, *args: Any, **options: Any) -> Any:
    """Return the tensor; NotImplemented where no element is traced.

    Traced are tensors without axes, and numbers that the step computes. As in PyTorch no gradient
    flows into the elements, and the widest dtype holds all of them.
    """
    elements = _elements(data)
    tensors = [one for one in map(_tensor, elements) if one is not None]
    if not tensors or args or not options.keys() <= _OPTIONS:
        return NotImplemented
    if any(one.dim() for one in tensors) or isinstance(data, FakeTensor):
        return NotImplemented
    dtype = options.get("dtype") or functools.reduce(torch.promote_types, map(_dtype, elements))
    made = _stack(data, dtype, options.get("device") or tensors[0].device)
    return made.requires_grad_() if options.get("requires_grad") else made


_OPTIONS = frozenset({"dtype", "device", "requires_grad"})


def _elements(data: Any) -> list[Any]:
    return list(_each(data)) if isinstance(data, (list, tuple)) else [data]


def _each(data: Any) -> Iterator[Any]:
    for one in data:
        if isinstance(one, (list, tuple)):
            yield from _each(one)
        else:
            yield one


def _tensor(element: Any) -> torch.Tensor | None:
    if isinstance(element, LaterNumber):
        return element.tensor
    return element if isinstance(element, FakeTensor) else None


def _dtype(element: Any) -> torch.dtype:
    if isinstance(element, LaterNumber):
        dtype = element.tensor.dtype
        return torch.get_default_dtype() if dtype.is_floating_point else dtype
    return element.dtype if isinstance(element, torch.Tensor) else torch.tensor(element).dtype


def _stack(data: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
    if isinstance(data, (list, tuple)):
        return torch.stack([_stack(one, dtype, device) for one in data])
    if isinstance(data, LaterNumber):
        return data.tensor.to(device, dtype, copy=True)
    if isinstance(data, torch.Tensor):
        return data.detach().to(device, dtype)
    return torch.tensor(data, dtype=dtype, device=device)
