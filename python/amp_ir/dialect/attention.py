# SPDX-License-Identifier: Apache-2.0
"""Scaled dot-product attention as a fused op; attention_parts.py has the ops of its decomposition.

Shapes: q f[*batch, s, d], k f[*batch, t, d], v f[*batch, t, e]. The mask broadcasts to
[*batch, s, t]: bool (True takes part) or floating (added to the scaled scores). `is_causal` lets
row i see columns 0 to i. With w = softmax(scale * q k^T + mask):

    out = (keep / (1 - p) * w) v,     lse = log sum exp(scale * q k^T + mask)   (f32[*batch, s])

Where q is low, w and the gradient of the scores are rounded to its dtype before they are
multiplied.
A row that sees nothing has w = 0 and lse = 0, so that its gradients are 0 too. The dropout mask is
drawn from (random_state, index) over [*batch, s, t] and never stored.

Source: Vaswani et al. 2017, 3.2.1; the gradient from lse is Dao et al. 2022, algorithm 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from amp_ir.dialect.attention_parts import (
    Options,
    attention_probabilities_of,
    attention_score_gradient_of,
    attention_weights_of,
    check_rest,
)
from amp_ir.dialect.define import Shape, Tensor, define, expect_rest

Stored = Callable[[torch.Tensor], torch.Tensor]


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *rest: torch.Tensor,
    stored: Stored,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    scores = q @ k.mT
    weights, lse = attention_probabilities_of(scores, *rest, out_dtype=None, **options)
    return stored(weights) @ v, lse


def _attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *rest: torch.Tensor,
    stored: Stored,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    scores = q @ k.mT
    weights = stored(attention_weights_of(scores, lse, *rest, out_dtype=None, **options))
    grad_scores = stored(
        attention_score_gradient_of(
            scores, lse, grad @ v.mT, grad, out, *rest, out_dtype=None, **options
        )
    )
    return grad_scores @ k, grad_scores.mT @ q, weights.mT @ grad


def _check_qkv(op: str, q: Tensor, k: Tensor, v: Tensor) -> Shape:
    """Check the three and return the shape of their scores."""
    q.expect_float()
    if q.ndim < 2:
        q.refuse("shape", "(*batch, rows, width)")
    for other in (k, v):
        other.expect_dtype(q.dtype)
        if other.ndim != q.ndim:
            other.refuse("shape", f"{q.ndim} axes, as {q.label} of shape {q.shape}")
    k.expect_shape((*q.shape[:-2], k.shape[-2], q.shape[-1]))
    v.expect_shape((*q.shape[:-2], k.shape[-2], v.shape[-1]))
    return (*q.shape[:-1], k.shape[-2])


@define(
    "amp_ir.attention", "q", "k", "v", "mask?", "random_state?", reference=_attention,
    stores_inside=True,
)  # fmt: skip
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *rest: Tensor,
    has_mask: bool,
    dropout_p: float,
    index: int,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    """Compute attention of q, k, v, a mask if `has_mask`, random_state if `dropout_p` > 0.

    -> (out f[*batch, s, e] in the dtype of q, lse f32[*batch, s]).
    """
    scores = _check_qkv("amp_ir.attention", q, k, v)
    options = Options(has_mask, dropout_p, index, is_causal, scale)
    check_rest("amp_ir.attention", rest, scores, options)
    out = q.with_shape((*q.shape[:-1], v.shape[-1]))
    return out, Tensor(scores[:-1], q.statistic_dtype)


@define(
    "amp_ir.attention_backward",
    "grad", "q", "k", "v", "out", "lse", "mask?", "random_state?",
    reference=_attention_backward, stores_inside=True,
)  # fmt: skip
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Tensor,
    has_mask: bool,
    dropout_p: float,
    index: int,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    """Return (dq, dk, dv) like q, k, v; grad and out f[*batch, s, e], lse f[*batch, s].

    The options and the optional arguments are those of the forward op. The mask has no gradient.
    """
    op = "amp_ir.attention_backward"
    scores = _check_qkv(op, q, k, v)
    options = Options(has_mask, dropout_p, index, is_causal, scale)
    check_rest(op, rest, scores, options)
    expect_rest((grad, out), {"grad": True, "out": True}, (*q.shape[:-1], v.shape[-1]), op)
    lse.expect_float()
    lse.expect_shape(scores[:-1])
    return q.with_shape(q.shape), k.with_shape(k.shape), v.with_shape(v.shape)
