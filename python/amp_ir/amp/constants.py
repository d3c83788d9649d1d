# SPDX-License-Identifier: Apache-2.0
"""Constants that a low dtype can hold.

Overflow: the nearest low number is infinite and the constant is not (1e9 in float16, and the least
float32, -3.4028e38, in bfloat16: its nearest is -inf). Underflow: the nearest low number is below
the normal range, where it has lost bits or become 0 (1e-12 in float16).
"""

from __future__ import annotations

import enum
import functools

import numpy as np

# Largest finite value, rounding included, and smallest normal number.
_OVERFLOWS_AT = {"float16": 65520.0, "bfloat16": float.fromhex("0x1.ffp127")}
_LEAST_NORMAL = {"float16": 2.0**-14, "bfloat16": 2.0**-126}


class Holds(enum.Enum):
    """The outcome of rounding a constant to a low dtype."""

    EXACTLY = "exactly"
    ROUNDED = "rounded"
    UNDERFLOWS = "underflows"
    OVERFLOWS = "overflows"


def holds(values: np.ndarray, low_dtype: str) -> Holds:
    """Return the worst that happens to an element of a float32 array in `low_dtype`."""
    if low_dtype == "float32":
        return Holds.EXACTLY
    if values.size == 1:
        return _holds_number(float(values.reshape(())), low_dtype)
    magnitudes = np.abs(values[np.isfinite(values)].astype(np.float64))
    if magnitudes.size == 0:
        return Holds.EXACTLY
    if magnitudes.max() >= _OVERFLOWS_AT[low_dtype]:
        return Holds.OVERFLOWS
    if np.any((magnitudes > 0) & (magnitudes < _LEAST_NORMAL[low_dtype])):
        return Holds.UNDERFLOWS
    return Holds.EXACTLY if _is_exact(values, low_dtype) else Holds.ROUNDED


@functools.lru_cache(maxsize=4096)
def _holds_number(number: float, low_dtype: str) -> Holds:
    magnitude = abs(number)
    if not np.isfinite(number) or magnitude == 0:
        return Holds.EXACTLY
    if magnitude >= _OVERFLOWS_AT[low_dtype]:
        return Holds.OVERFLOWS
    if magnitude < _LEAST_NORMAL[low_dtype]:
        return Holds.UNDERFLOWS
    exact = _is_exact(np.asarray([number], "float32"), low_dtype)
    return Holds.EXACTLY if exact else Holds.ROUNDED


def _is_exact(values: np.ndarray, low_dtype: str) -> bool:
    if low_dtype == "float16":
        with np.errstate(over="ignore"):
            return bool(np.all(values.astype("float16").astype("float32") == values))
    bits = np.ascontiguousarray(values, "float32").view("uint32")
    return bool(np.all(bits & 0xFFFF == 0))
