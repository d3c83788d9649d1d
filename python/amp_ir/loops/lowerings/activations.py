# SPDX-License-Identifier: Apache-2.0
"""Lowering of the dialect's pointwise tables: activations and losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from amp_ir.dialect.activations import ACTIVATIONS, Formula
from amp_ir.dialect.losses import LOSSES, Loss
from amp_ir.loops.body_context import let
from amp_ir.loops.builders import elementwise, pointwise, reduce, squeeze
from amp_ir.loops.ir import Value, compute_dtype
from amp_ir.loops.lowering_registry import Lowering, lowers
from amp_ir.loops.lowerings import formula_math
from amp_ir.loops.math import constant


def _elements(values: Sequence[Value], index: tuple[Any, ...]) -> list[Any]:
    return [let(value[index]) for value in values]


def sum_all(shape: Sequence[int], dtype: str, body: Callable[..., Any]) -> Value:
    """Sum over a whole index space, to a scalar value."""
    if not shape:
        return pointwise((), dtype, body)
    return squeeze(reduce("sum", shape, range(len(shape)), body, dtype), ())


def _lower_formula(name: str, formula: Formula) -> None:
    @lowers(f"amp_ir.{name}")
    def lower(op: Lowering, *values: Value, **options: Any) -> Value:
        result = op.results[0]
        return elementwise(
            result.shape,
            result.dtype,
            values,
            lambda *i: formula(formula_math, *_elements(values, i), **options),
        )


def _lower_loss(name: str, loss: Loss) -> None:
    @lowers(f"amp_ir.{name}")
    def forward(op: Lowering, *values: Value, reduction: str, **options: Any) -> Value:
        result, shape = op.results[0], values[0].shape

        def body(*i: Any) -> Any:
            return loss.value(formula_math, *_elements(values, i), **options)

        if reduction == "none":
            return pointwise(shape, result.dtype, body)
        dtype = compute_dtype(result.dtype)
        total = sum_all(shape, dtype, body)
        scale = 1.0 / math.prod(shape) if reduction == "mean" else 1.0
        return pointwise((), result.dtype, lambda *i: total[i] * constant(scale, dtype))

    @lowers(f"amp_ir.{name}_backward")
    def backward(
        op: Lowering, grad: Value, *values: Value, reduction: str, **options: Any
    ) -> Value:
        result = op.results[0]
        scale = 1.0 / math.prod(result.shape) if reduction == "mean" else 1.0

        def body(*i: Any) -> Any:
            slope = loss.slope(formula_math, *_elements(values, i), **options)
            return grad[i] * slope * constant(scale, compute_dtype(grad.dtype))

        return pointwise(result.shape, result.dtype, body)


for _name, _formula in ACTIVATIONS.items():
    _lower_formula(_name, _formula)
for _name, _loss in LOSSES.items():
    _lower_loss(_name, _loss)
