# SPDX-License-Identifier: Apache-2.0
"""Tensors that are others times a number, as a step has them."""

from __future__ import annotations

from tvm import relax

from amp_ir.ir.dataflow import op_name
from amp_ir.ir.static_shape import shape_of


def factored(value: relax.Expr | None) -> tuple[relax.Expr, relax.Expr] | None:
    """Return the tensor and the number whose product a value is; None for other values.

    The number has no axes, and the tensor has the axes of the value. Of `negative` it is -1.
    """
    if not isinstance(value, relax.Call):
        return None
    if op_name(value) == "relax.negative":
        return value.args[0], relax.const(-1.0, "float32")
    if op_name(value) == "relax.multiply":
        for one, number in (value.args, reversed(value.args)):
            if shape_of(number) == () and shape_of(one) == shape_of(value):
                return one, number
    return None


def is_float32(type_: relax.Type) -> bool:
    """Return whether it is the type of a tensor of float32."""
    return isinstance(type_, relax.TensorType) and str(type_.dtype) == "float32"
