# SPDX-License-Identifier: Apache-2.0
"""Softmax, log_softmax and their gradients."""

from __future__ import annotations

import torch
from tvm import relax

from amp_ir.importer.converters.emitter import Emitter
from amp_ir.importer.converters.promotion import shape_of
from amp_ir.importer.converters.registry import converts

aten = torch.ops.aten


@converts(aten._softmax.default, aten._safe_softmax.default)
def softmax(ops: Emitter, x: relax.Expr, dim: int, half_to_float: bool = False) -> relax.Expr:
    """Return exp(x) over its sum along one axis."""
    if not shape_of(x):
        return ops.full((), 1, ops.dtype)
    return ops.emit(relax.op.nn.softmax(ops.cast(x, ops.dtype), dim % len(ops.shape)))


@converts(aten._log_softmax.default)
def log_softmax(ops: Emitter, x: relax.Expr, dim: int, half_to_float: bool = False) -> relax.Expr:
    """Return the logarithm of softmax."""
    if not shape_of(x):
        return ops.full((), 0, ops.dtype)
    return ops.emit(relax.op.nn.log_softmax(ops.cast(x, ops.dtype), dim % len(ops.shape)))


@converts(aten._softmax_backward_data.default)
def softmax_backward(
    ops: Emitter, grad: relax.Expr, y: relax.Expr, dim: int, input_dtype: torch.dtype
) -> relax.Expr:
    """Return the gradient of softmax from its result."""
    return _softmax_gradient(ops, "amp_ir.softmax_backward", grad, y, dim)


@converts(aten._log_softmax_backward_data.default)
def log_softmax_backward(
    ops: Emitter, grad: relax.Expr, y: relax.Expr, dim: int, input_dtype: torch.dtype
) -> relax.Expr:
    """Return the gradient of log_softmax from its result."""
    return _softmax_gradient(ops, "amp_ir.log_softmax_backward", grad, y, dim)


def _softmax_gradient(
    ops: Emitter, name: str, grad: relax.Expr, y: relax.Expr, dim: int
) -> relax.Expr:
    if not shape_of(y):
        return ops.full((), 0, ops.dtype)
    return ops.cast(ops.call(name, grad, y, axis=dim % len(ops.shape)), ops.dtype)
