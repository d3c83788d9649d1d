# SPDX-License-Identifier: Apache-2.0
"""`copy.deepcopy` of a tensor, or of a module with all of its: a clone of what it holds then."""

from __future__ import annotations

import copy
from typing import Any

import torch


def deep_copy(tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
    """Return a copy as PyTorch does, which looks at memory that no traced tensor has.

    A parameter's has no gradient, any other tensor's has a copy of it.
    """
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        return NotImplemented  # PyTorch refuses it
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    with torch.no_grad():
        copied = tensor.clone(memory_format=torch.preserve_format)
    copied.requires_grad_(tensor.requires_grad)
    if is_parameter:
        copied._is_param = True
    memo[id(tensor)] = copied
    if not is_parameter:
        if tensor.grad is not None:
            copied.grad = copy.deepcopy(tensor.grad, memo)
        vars(copied).update(copy.deepcopy(vars(tensor), memo))
    return copied
