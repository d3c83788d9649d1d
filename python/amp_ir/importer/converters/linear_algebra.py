# SPDX-License-Identifier: Apache-2.0
"""Matmuls; a bias is a separate add, which dispatch may fold into the GEMM again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tvm import relax

from amp_ir.importer.converters.emitter import Emitter
from amp_ir.importer.converters.promotion import LOW_DTYPES, Operand, is_scalar, shape_of
from amp_ir.importer.converters.registry import converts

aten = torch.ops.aten
# Below this many multiplications a matrix ATen computes a batched product itself (`bmm` of 2.13).
_SMALL_BATCHED_PRODUCT = 400


@converts(aten.mm.default, aten.bmm.default, aten.mv.default, aten.matmul.default)
def matmul(ops: Emitter, a: relax.Expr, b: relax.Expr) -> relax.Expr:
    """Return a @ b in the dtype of the operands, without an explicit out_dtype."""
    return ops.emit(relax.op.matmul(a, b))


@converts(aten.dot.default, aten.vdot.default)
def dot(ops: Emitter, a: relax.Expr, b: relax.Expr) -> relax.Expr:
    """Return the inner product of two vectors."""
    (n,) = shape_of(a)
    product = ops.emit(relax.op.matmul(ops.reshape(a, [1, n]), ops.reshape(b, [n, 1])))
    return ops.reshape(product, [])


@converts(aten.linear.default)
def linear(
    ops: Emitter, x: relax.Expr, weight: relax.Expr, bias: relax.Expr | None = None
) -> relax.Expr:
    """Return x @ weight.T + bias."""
    product = ops.emit(relax.op.matmul(x, ops.permute(weight, [1, 0])))
    return product if bias is None else ops.add(product, bias)


@converts(aten.addmm.default, aten.baddbmm.default, aten.addmv.default)
def addmm(
    ops: Emitter,
    bias: relax.Expr,
    a: relax.Expr,
    b: relax.Expr,
    *,
    beta: Operand = 1,
    alpha: Operand = 1,
) -> relax.Expr:
    """Return beta * bias + alpha * a @ b; with beta = 0 the bias is not read, NaN or not.

    With alpha = 0 the product is not either where PyTorch calls a BLAS: not for low dtypes, and not
    in small batched products.
    In a low dtype all of it is computed in float32 and rounded once, as PyTorch does. Dispatch adds
    a vector to a matmul before its rounding anyway.
    """
    dtype = str(a.ty.dtype)
    if is_scalar(alpha) and alpha == 0 and _calls_blas(a, b):
        return ops.broadcast(_without_product(ops, bias, beta), ops.shape)
    is_plain = all(is_scalar(one) and one == 1 for one in (alpha, beta)) and bias.ty.ndim == 1
    if dtype not in LOW_DTYPES or is_plain:
        product = _scaled(ops, ops.emit(relax.op.matmul(a, b)), alpha)
        if is_scalar(beta) and beta == 0:
            return product
        return ops.add(product, _scaled(ops, bias, beta))
    result = _scaled(ops, ops.emit(relax.op.matmul(a, b, out_dtype="float32")), alpha)
    if not (is_scalar(beta) and beta == 0):
        result = ops.add(result, _scaled(ops, ops.cast(bias, "float32"), beta))
    return ops.cast(result, dtype)


def _calls_blas(a: relax.Expr, b: relax.Expr) -> bool:
    """Return whether PyTorch gives a product to a BLAS, which reads nothing where alpha is 0."""
    *batch, n, k = shape_of(a)
    is_small = bool(batch) and n * k * shape_of(b)[-1] < _SMALL_BATCHED_PRODUCT
    return str(a.ty.dtype) not in LOW_DTYPES and not is_small


def _without_product(ops: Emitter, bias: relax.Expr, beta: Operand) -> relax.Expr:
    """Return beta * bias, or 0."""
    if is_scalar(beta) and beta == 0:
        return ops.full(ops.shape, 0, ops.dtype)
    return _scaled(ops, bias, beta)


@converts(aten.addbmm.default)
def addbmm(
    ops: Emitter,
    bias: relax.Expr,
    a: relax.Expr,
    b: relax.Expr,
    *,
    beta: Operand = 1,
    alpha: Operand = 1,
) -> relax.Expr:
    """Return beta * bias + alpha * the sum of a @ b over the batch, as one GEMM with a longer k."""
    batch, n, k = shape_of(a)
    wide = ops.reshape(ops.permute(a, [1, 0, 2]), [n, batch * k])
    tall = ops.reshape(b, [batch * k, shape_of(b)[2]])
    result: relax.Expr = addmm(ops, bias, wide, tall, beta=beta, alpha=alpha)
    return result


@converts(aten._trilinear.default)
def trilinear(
    ops: Emitter,
    a: relax.Expr,
    b: relax.Expr,
    c: relax.Expr,
    expand_a: Sequence[int],
    expand_b: Sequence[int],
    expand_c: Sequence[int],
    sum_dims: Sequence[int],
    _unroll_dim: int = 1,
) -> relax.Expr:
    """Return the product of three tensors with new axes at `expand`, summed over `sum_dims`."""
    wide = [_with_axes(ops, *one) for one in ((a, expand_a), (b, expand_b), (c, expand_c))]
    product = ops.multiply(ops.multiply(wide[0], wide[1]), wide[2])
    return ops.emit(relax.op.sum(product, list(sum_dims))) if sum_dims else product


def _with_axes(ops: Emitter, x: relax.Expr, axes: Sequence[int]) -> relax.Expr:
    shape = list(shape_of(x))
    for axis in sorted(axes):
        shape.insert(axis, 1)
    return ops.reshape(x, shape)


def _scaled(ops: Emitter, x: relax.Expr, factor: Operand) -> relax.Expr:
    return x if is_scalar(factor) and factor == 1 else ops.multiply(x, factor)
