# SPDX-License-Identifier: Apache-2.0
"""Represent ranges of numbers: of a dtype, of a constant, and under a comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np
from tvm import relax
from tvm.ir import GenericConst


@attrs.frozen
class Range:
    """All numbers from `low` to `high`, both included."""

    low: float | int
    high: float | int

    def join(self, other: Range) -> Range:
        """Return the smallest range that holds both."""
        return Range(min(self.low, other.low), max(self.high, other.high))

    def meet(self, other: Range) -> Range | None:
        """Return the intersection of both; None if it is empty."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        return Range(low, high) if low <= high else None


BOOLEAN = Range(0, 1)
FALSE, TRUE = Range(0, 0), Range(1, 1)

COMPARISONS = {
    "relax.less": "<",
    "relax.less_equal": "<=",
    "relax.greater": ">",
    "relax.greater_equal": ">=",
    "relax.equal": "==",
    "relax.not_equal": "!=",
}
OPPOSITE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}


def join_all(parts: Sequence[Range | None]) -> Range | None:
    """Return the smallest range that holds all; None where one of them is unknown."""
    result = parts[0]
    for part in parts[1:]:
        if result is None or part is None:
            return None
        result = result.join(part)
    return result


def limited(relation: str, limit: Range) -> Range:
    """Return the integers that can be in `relation` to one of `limit`."""
    if relation == "==":
        return limit
    if relation in ("<", "<="):
        return Range(-math.inf, limit.high - (relation == "<"))
    if relation in (">", ">="):
        return Range(limit.low + (relation == ">"), math.inf)
    return Range(-math.inf, math.inf)


def dtype_of(expr: relax.Expr) -> str:
    """Return the dtype of a tensor; "" for anything else."""
    return str(getattr(expr.ty, "dtype", ""))


def is_integer(expr: relax.Expr) -> bool:
    """Return whether it is a tensor of integers."""
    return dtype_of(expr).startswith(("int", "uint"))


def range_of_dtype(expr: relax.Expr) -> Range | None:
    """Return the range that a dtype can hold; None for floats, which can be NaN."""
    dtype = dtype_of(expr)
    if dtype == "bool":
        return BOOLEAN
    if not dtype.startswith(("int", "uint")):
        return None
    limits = np.iinfo(dtype)
    return Range(int(limits.min), int(limits.max))


def range_of_constant(constant: GenericConst) -> Range | None:
    """Return the range of a constant; None for a low dtype, and for floats that are not finite."""
    if "float" in dtype_of(constant) and dtype_of(constant) not in ("float32", "float64"):
        return None
    array = constant.value.numpy()
    if array.size == 0 or (array.dtype.kind == "f" and not np.isfinite(array).all()):
        return range_of_dtype(constant)
    return Range(array.min().item(), array.max().item())
