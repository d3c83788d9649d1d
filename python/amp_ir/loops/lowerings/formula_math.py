# SPDX-License-Identifier: Apache-2.0
"""`loops.math` as the dialect's formulas use it: numbers are literals, results are named once.

The counterpart of `amp_ir.dialect.torch_math`.
"""

from __future__ import annotations

from typing import Any

from amp_ir.loops import math as m
from amp_ir.loops.ir import bind


def exp(x: Any) -> Any:
    """e^x."""
    return bind(m.exp(x))


def log(x: Any) -> Any:
    """Natural logarithm."""
    return bind(m.log(x))


def log1p(x: Any) -> Any:
    """log(1 + x)."""
    return bind(m.log1p(x))


def tanh(x: Any) -> Any:
    """Hyperbolic tangent."""
    return bind(m.tanh(x))


def normal_cdf(x: Any, bell: Any) -> Any:
    """How much of the normal distribution lies below x, whose `bell` is e^(-x^2 / 2)."""
    return bind(m.normal_cdf(x, bell))


def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x)."""
    return bind(m.sigmoid(x))


def absolute(x: Any) -> Any:
    """|x|."""
    return bind(m.absolute(x))


def maximum(x: Any, bound: float) -> Any:
    """The larger of an element and a number; NaN if the element is."""
    x, bound = bind(x), m.constant(bound, m.dtype_of(x))
    return bind(m.select(x < bound, bound, x))


def minimum(x: Any, bound: float) -> Any:
    """The smaller of an element and a number; NaN if the element is."""
    x, bound = bind(x), m.constant(bound, m.dtype_of(x))
    return bind(m.select(x > bound, bound, x))


def select(condition: Any, chosen: Any, other: Any) -> Any:
    """`chosen` where the condition holds, else `other`; either may be a number."""
    dtype = m.dtype_of(other if isinstance(chosen, int | float) else chosen)
    chosen, other = (
        m.constant(one, dtype) if isinstance(one, int | float) else one for one in (chosen, other)
    )
    return bind(m.select(condition, chosen, other))
