# SPDX-License-Identifier: Apache-2.0
"""Scaled dot-product attention, which the capture keeps as one custom op.

The overloads are named by text, so that this module does not import the capture's ops.
"""

from __future__ import annotations

import math

from tvm import relax

from amp_ir.importer.converters.emitter import Emitter, dtype_name
from amp_ir.importer.converters.promotion import shape_of
from amp_ir.importer.converters.registry import converts


@converts("amp_ir.attention.default")
def attention(
    ops: Emitter,
    q: relax.Expr,
    k: relax.Expr,
    v: relax.Expr,
    mask: relax.Expr | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None = None,
) -> tuple[relax.Expr, ...]:
    """Return (out f[*batch, s, e], lse f32[*batch, s]); dropout draws from the random state."""
    drawn, index = ops.draw() if dropout_p > 0 else (None, 0)
    out, lse = ops.call(
        "amp_ir.attention",
        *_present(q, k, v, mask, drawn),
        has_mask=mask is not None,
        dropout_p=float(dropout_p),
        index=index,
        is_causal=is_causal,
        scale=_scale(q, scale),
    )
    return out, ops.cast(lse, dtype_name(ops.result[1].dtype))


@converts("amp_ir.attention_backward.default")
def attention_backward(
    ops: Emitter,
    grad: relax.Expr,
    q: relax.Expr,
    k: relax.Expr,
    v: relax.Expr,
    out: relax.Expr,
    lse: relax.Expr,
    mask: relax.Expr | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None = None,
) -> tuple[relax.Expr, ...]:
    """Return (dq, dk, dv), with the dropout mask of the forward op."""
    drawn, index = ops.draw() if dropout_p > 0 else (None, 0)
    gradients: tuple[relax.Expr, ...] = ops.call(
        "amp_ir.attention_backward",
        *_present(grad, q, k, v, out, lse, mask, drawn),
        has_mask=mask is not None,
        dropout_p=float(dropout_p),
        index=index,
        is_causal=is_causal,
        scale=_scale(q, scale),
    )
    return gradients


def _present(*tensors: relax.Expr | None) -> list[relax.Expr]:
    return [tensor for tensor in tensors if tensor is not None]


def _scale(q: relax.Expr, scale: float | None) -> float:
    return 1.0 / math.sqrt(shape_of(q)[-1]) if scale is None else float(scale)
