# SPDX-License-Identifier: Apache-2.0
"""Tensors made from numbers: full, arange, scalar_tensor, empty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tvm import relax

from amp_ir.importer.converters.emitter import Emitter
from amp_ir.importer.converters.promotion import Operand, Scalar, is_float, is_scalar
from amp_ir.importer.converters.registry import converts

aten = torch.ops.aten


@converts(aten.full.default, aten.full_like.default, aten.new_full.default)
def full(ops: Emitter, _like: Any, *value: Operand, **_options: Any) -> relax.Expr:
    """Return one value everywhere; the result's shape and dtype are PyTorch's own."""
    return ops.full(ops.shape, value[-1], ops.dtype)


@converts(aten.fill.Scalar, aten.fill.Tensor)
def fill(ops: Emitter, _x: relax.Expr, value: Operand) -> relax.Expr:
    """Return one value in the shape and dtype of x."""
    return ops.full(ops.shape, value, ops.dtype)


@converts(aten.scalar_tensor.default)
def scalar_tensor(ops: Emitter, value: Operand, **_options: Any) -> relax.Expr:
    """Return a number as a 0-d tensor."""
    return ops.cast(value, ops.dtype)


@converts(
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
def zeros(ops: Emitter, *_arguments: Any, **_options: Any) -> relax.Expr:
    """Return zeros; also for uninitialized tensors, so that a step is reproducible."""
    return ops.full(ops.shape, 0, ops.dtype)


@converts(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(ops: Emitter, *_arguments: Any, **_options: Any) -> relax.Expr:
    """Return ones."""
    return ops.full(ops.shape, 1, ops.dtype)


@converts(aten.arange.start_step, aten.arange.start, aten.arange.default)
def arange(ops: Emitter, *bounds: Scalar, **_options: Any) -> relax.Expr:
    """Return begin, begin + step, ... below end."""
    if not all(is_scalar(bound) for bound in bounds):
        ops.reject("its bounds are tensors, so that the length depends on their values")
    if is_float(ops.dtype):
        # As a constant: PyTorch's rounding of begin + i * step, whatever the kernels do.
        return ops.tensor(torch.arange(*bounds, dtype=ops.result.dtype))
    begin, end = (0, bounds[0]) if len(bounds) == 1 else bounds[:2]
    step = bounds[2] if len(bounds) > 2 else 1
    if step < 0:
        # Relax infers the length of an arange correctly for positive steps only.
        return ops.tensor(torch.arange(begin, end, step, dtype=ops.result.dtype))
    return ops.emit(relax.op.arange(int(begin), int(end), int(step), ops.dtype))


@converts(aten.linspace.default)
def linspace(ops: Emitter, start: Operand, end: Operand, steps: int, **_options: Any) -> relax.Expr:
    """Return `steps` values from start to end, both included."""
    if not (is_scalar(start) and is_scalar(end)):
        ops.reject("its bounds are tensors")
    return ops.tensor(torch.linspace(start, end, steps, dtype=ops.result.dtype))


@converts(aten.eye.default, aten.eye.m)
def eye(ops: Emitter, *_extents: int, **_options: Any) -> relax.Expr:
    """Return ones on the diagonal, and zeros."""
    return ops.tensor(torch.eye(*ops.shape, dtype=ops.result.dtype))


@converts(aten.tril_indices.default)
def tril_indices(ops: Emitter, row: int, col: int, offset: int = 0, **_options: Any) -> relax.Expr:
    """Return the rows and columns of the lower triangle."""
    return ops.tensor(torch.tril_indices(row, col, offset, dtype=ops.result.dtype))


@converts(aten.triu_indices.default)
def triu_indices(ops: Emitter, row: int, col: int, offset: int = 0, **_options: Any) -> relax.Expr:
    """Return the rows and columns of the upper triangle."""
    return ops.tensor(torch.triu_indices(row, col, offset, dtype=ops.result.dtype))


def static_indices(ops: Emitter, values: Sequence[int] | torch.Tensor) -> relax.Expr:
    """Return an int64 constant of positions known at import."""
    return ops.tensor(torch.as_tensor(values, dtype=torch.int64))
