# SPDX-License-Identifier: Apache-2.0
"""`loops.math` for the dialect's formulas: numbers are literals, results are named once.

The counterpart of `amp_ir.dialect.torch_math`.
"""

from __future__ import annotations

from typing import Any

from amp_ir.loops import math as m
from amp_ir.loops.body_context import let


def exp(x: Any) -> Any:
    """Return e^x."""
    return let(m.exp(x))


def log(x: Any) -> Any:
    """Return the natural logarithm."""
    return let(m.log(x))


def log1p(x: Any) -> Any:
    """Return log(1 + x)."""
    return let(m.log1p(x))


def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent."""
    return let(m.tanh(x))


def bell(x: Any) -> Any:
    """Return e^(-x^2 / 2)."""
    return let(m.bell(x))


def normal_cdf(x: Any, bell: Any) -> Any:
    """Return the normal distribution function at x; `bell` is e^(-x^2 / 2)."""
    return let(m.normal_cdf(x, bell))


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + e^-x)."""
    return let(m.sigmoid(x))


def absolute(x: Any) -> Any:
    """Return |x|."""
    return let(m.absolute(x))


def scaled(x: Any, factor: float) -> Any:
    """Return an element times a number; 0 times infinity is NaN, which TVM's `*` folds to 0."""
    x = let(x)
    return let(m.product(x, m.constant(factor, m.dtype_of(x))))


def divided(x: Any, divisor: float) -> Any:
    """Return an element divided by a number; by 0 it is infinite or NaN."""
    x = let(x)
    return let(m.quotient(x, m.constant(divisor, m.dtype_of(x))))


def maximum(x: Any, bound: float) -> Any:
    """Return the larger of an element and a number; NaN if the element is."""
    x, bound = let(x), m.constant(bound, m.dtype_of(x))
    return let(m.select(x < bound, bound, x))


def minimum(x: Any, bound: float) -> Any:
    """Return the smaller of an element and a number; NaN if the element is."""
    x, bound = let(x), m.constant(bound, m.dtype_of(x))
    return let(m.select(x > bound, bound, x))


def select(condition: Any, chosen: Any, other: Any) -> Any:
    """Return `chosen` where the condition is true, else `other`; either may be a number."""
    dtype = m.dtype_of(other if isinstance(chosen, int | float) else chosen)
    chosen, other = (
        m.constant(one, dtype) if isinstance(one, int | float) else one for one in (chosen, other)
    )
    return let(m.select(condition, chosen, other))
