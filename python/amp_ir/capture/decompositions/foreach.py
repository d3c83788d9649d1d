# SPDX-License-Identifier: Apache-2.0
"""`torch._foreach_*` as calls of the op for one tensor, in the order of the lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten

_PREFIX = "_foreach_"
# Arguments that the op for one tensor takes by name only.
_BY_NAME = frozenset({"alpha", "memory_format"})
_OTHER_NAMES = {
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
    named = {one.name: value for one, value in zip(func._schema.arguments, args, strict=False)}
    named.update(kwargs)
    if isinstance(named.get("scalars"), torch.Tensor):
        named["scalars"] = named["scalars"].unbind()
    # Of `_foreach_pow(2.0, tensors)` the list is the exponents.
    count = next(len(one) for one in named.values() if isinstance(one, (list, tuple)))
    op = _OPS.get(name.removesuffix("_")) or _plain_call(name)
    results = [
        op(name, {key: _at(value, index, count) for key, value in named.items()})
        for index in range(count)
    ]
    return None if name.endswith("_") else results


def _at(value: Any, index: int, count: int) -> Any:
    is_list = isinstance(value, (list, tuple)) and len(value) == count
    return value[index] if is_list else value


def _plain_call(name: str) -> Callable[..., Any]:
    """Return a call of the op for one tensor, which has the arguments in the same order."""
    op = getattr(aten, _OTHER_NAMES.get(name, name))

    def call(_: str, named: Mapping[str, Any]) -> Any:
        options = {key: value for key, value in named.items() if key in _BY_NAME}
        return op(*(value for key, value in named.items() if key not in _BY_NAME), **options)

    return call


def _add_ratio_or_product(name: str, named: Mapping[str, Any]) -> Any:
    """Call addcmul or addcdiv: the number of these alone has another name and is given by it."""
    tensors = [named[key] for key in ("self", "tensor1", "tensor2")]
    number = named.get("value", named.get("scalars", 1))
    if isinstance(number, torch.Tensor):
        tensors[1] = tensors[1] * number
        number = 1
    return getattr(aten, name)(*tensors, value=number)


def _norm(_: str, named: Mapping[str, Any]) -> Any:
    return aten.linalg_vector_norm(named["self"], named.get("ord", 2), dtype=named.get("dtype"))


_OPS: Mapping[str, Callable[..., Any]] = {
    "addcmul": _add_ratio_or_product,
    "addcdiv": _add_ratio_or_product,
    "norm": _norm,
}
