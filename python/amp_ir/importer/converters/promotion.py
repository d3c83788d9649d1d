# SPDX-License-Identifier: Apache-2.0
"""PyTorch's type promotion, on Relax expressions and Python numbers."""

from __future__ import annotations

from typing import TypeAlias, TypeGuard

import torch
from tvm import relax

Scalar: TypeAlias = bool | int | float
Operand: TypeAlias = relax.Expr | Scalar

TORCH_DTYPES: dict[str, torch.dtype] = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
DTYPE_NAMES: dict[torch.dtype, str] = {value: name for name, value in TORCH_DTYPES.items()}
LOW_DTYPES = ("float16", "bfloat16")


def is_scalar(value: object) -> TypeGuard[Scalar]:
    """Return whether a converter's argument is a Python number (not the result of an FX node)."""
    return isinstance(value, (bool, int, float))


def is_float(dtype: str) -> bool:
    """Return whether a dtype name is one of the floating types."""
    return dtype.startswith(("float", "bfloat"))


def shape_of(x: relax.Expr) -> tuple[int, ...]:
    """Return the extents of a tensor expression."""
    return tuple(int(extent) for extent in x.ty.shape.values)


def dtype_of(x: Operand) -> str:
    """Return the dtype name of an operand; a Python float counts as PyTorch's default dtype."""
    if isinstance(x, bool):
        return "bool"
    if isinstance(x, int):
        return "int64"
    if isinstance(x, float):
        return DTYPE_NAMES[torch.get_default_dtype()]
    return str(x.ty.dtype)


def _priority(x: Operand) -> int:
    if is_scalar(x):
        return 0
    return 2 if shape_of(x) else 1


def promoted_dtype(*operands: Operand) -> str:
    """Return the dtype that PyTorch computes in when it combines the operands.

    Tensors of at least one dimension decide first, then 0-d tensors, then Python numbers; a later
    group matters only when its category (bool < int < float) is higher.
    Source: `combine_categories` in aten/src/ATen/native/TypeProperties.cpp.
    """
    groups: list[str | None] = [None, None, None]
    for operand in operands:
        rank = _priority(operand)
        dtype = dtype_of(operand)
        known = groups[rank]
        groups[rank] = dtype if known is None else _promote(known, dtype)
    result: str | None = None
    for group in groups:
        result = _combine(group, result)
    assert result is not None, "no operand to promote"
    return result


def _promote(a: str, b: str) -> str:
    if a == b:
        return a
    return DTYPE_NAMES[torch.promote_types(TORCH_DTYPES[a], TORCH_DTYPES[b])]


def _combine(higher: str | None, lower: str | None) -> str | None:
    if higher is None or lower is None:
        return higher or lower
    if is_float(higher):
        return higher
    return _promote(higher, lower) if higher == "bool" or is_float(lower) else higher
