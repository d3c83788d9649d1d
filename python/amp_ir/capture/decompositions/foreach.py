# SPDX-License-Identifier: Apache-2.0
"""`torch._foreach_*` as calls of the op for one tensor, in the order of the lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_PREFIX = "_foreach_"
_OTHER_NAMES = {
    "norm": "linalg_vector_norm",
    "maximum": "clamp_min",
    "maximum_": "clamp_min_",
    "minimum": "clamp_max",
    "minimum_": "clamp_max_",
}


def is_foreach(func: Any) -> bool:
    """Return whether an ATen op works on lists of tensors."""
    return func._schema.name.startswith("aten::" + _PREFIX)


def call_foreach(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call the op for one tensor at each position of the lists.

    Returns:
        a list of tensors; None for an op in place, as ATen does.
    """
    name = func._schema.name.removeprefix("aten::" + _PREFIX)
    op = getattr(torch.ops.aten, _OTHER_NAMES.get(name, name))
    count = len(args[0])
    results = [
        op(*(_at(value, index, count) for value in args), **_at_all(kwargs, index, count))
        for index in range(count)
    ]
    return None if name.endswith("_") else results


def _at(value: Any, index: int, count: int) -> Any:
    is_list = isinstance(value, (list, tuple)) and len(value) == count
    return value[index] if is_list else value


def _at_all(kwargs: Mapping[str, Any], index: int, count: int) -> dict[str, Any]:
    return {key: _at(value, index, count) for key, value in kwargs.items()}
