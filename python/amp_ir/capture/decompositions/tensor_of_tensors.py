# SPDX-License-Identifier: Apache-2.0
"""`torch.tensor([a, b])` of tensors without axes, which reads their values, as a stack of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


def tensor_of_tensors(data: Any, *args: Any, **options: Any) -> Any:
    """Return the tensor; NotImplemented where no element is a traced tensor without axes.

    As in PyTorch no gradient flows into the elements, and the widest dtype holds all of them.
    """
    elements = list(_elements(data)) if isinstance(data, (list, tuple)) else []
    traced = [one for one in elements if isinstance(one, FakeTensor)]
    if not traced or any(one.dim() for one in traced) or args or not options.keys() <= _OPTIONS:
        return NotImplemented
    dtype = options.get("dtype") or functools.reduce(torch.promote_types, map(_dtype, elements))
    made = _stack(data, dtype, options.get("device") or traced[0].device)
    return made.requires_grad_() if options.get("requires_grad") else made


_OPTIONS = frozenset({"dtype", "device", "requires_grad"})


def _elements(data: Any) -> Iterator[Any]:
    for one in data:
        if isinstance(one, (list, tuple)):
            yield from _elements(one)
        else:
            yield one


def _dtype(element: Any) -> torch.dtype:
    return element.dtype if isinstance(element, torch.Tensor) else torch.tensor(element).dtype


def _stack(data: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
    if isinstance(data, (list, tuple)):
        return torch.stack([_stack(one, dtype, device) for one in data])
    if isinstance(data, torch.Tensor):
        return data.detach().to(device, dtype)
    return torch.tensor(data, dtype=dtype, device=device)
