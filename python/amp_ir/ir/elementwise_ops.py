# SPDX-License-Identifier: Apache-2.0
"""The ops that compute each element from those at the same place."""

from __future__ import annotations

from typing import Any

from amp_ir.ir.dataflow import op_name

_ELEMENTWISE = frozenset(
    f"relax.{name}"
    for name in (
        "abs", "negative", "exp", "log", "sqrt", "rsqrt", "sin", "cos", "tan", "asin", "acos",
        "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "tanh", "sigmoid", "erf", "floor",
        "ceil", "round", "trunc", "sign", "square", "logical_not", "bitwise_not", "isfinite",
        "isinf", "isnan", "nn.relu", "nn.silu", "nn.leakyrelu", "astype", "clip", "where", "add",
        "subtract", "multiply", "divide", "floor_divide", "mod", "floor_mod", "power", "maximum",
        "minimum", "equal", "not_equal", "less", "less_equal", "greater", "greater_equal",
        "logical_and", "logical_or", "logical_xor",
    )
) | {"amp_ir.unscale", "amp_ir.average", "amp_ir.cast", "amp_ir.expm1", "amp_ir.log1p"}  # fmt: skip


def is_elementwise(value: Any) -> bool:
    """Return whether an op computes each element from those at the same place."""
    return op_name(value) in _ELEMENTWISE
