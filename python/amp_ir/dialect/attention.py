# SPDX-License-Identifier: Apache-2.0
"""Scaled dot-product attention, whole, and the three softmax-like ops that it expands into.

Shapes: q f[*batch, s, d], k f[*batch, t, d], v f[*batch, t, e]. The mask broadcasts to
[*batch, s, t]: bool (True takes part) or floating (added to the scaled scores). `is_causal` lets
row i see columns 0 to i. With w = softmax(scale * q k^T + mask):

    out = (keep / (1 - p) * w) v,     lse = log sum exp(scale * q k^T + mask)   (f32[*batch, s])

A row that sees nothing has w = 0 and lse = 0, so that its gradients are 0 too. The dropout mask is
drawn from (random_state, index) over [*batch, s, t] and never stored.

Source: Vaswani et al. 2017, 3.2.1; the gradient from lse is Dao et al. 2022, algorithm 4.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from amp_ir.dialect.define import (
    FLOAT_DTYPES,
    Shape,
    Tensor,
    check_choice,
    define,
    expect_rest,
)
from amp_ir.dialect.random import check_probability, check_state, keep_mask, survivor_scale
from amp_ir.errors import OptionError


@attrs.frozen
class Options:
    """The options that every op of this file takes."""

    has_mask: bool
    dropout_p: float
    index: int
    is_causal: bool
    scale: float


def _rest(
    rest: tuple[torch.Tensor, ...], options: Options
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(mask, random_state) of the arguments that may be absent."""
    mask = rest[0] if options.has_mask else None
    return mask, rest[-1] if options.dropout_p > 0 else None


def _hidden(
    scores: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
) -> torch.Tensor | None:
    """bool: the places that a row does not see, or None for none."""
    hidden = None
    if mask is not None and mask.dtype == torch.bool:
        hidden = ~mask
    if is_causal:
        upper = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        hidden = upper if hidden is None else hidden | upper
    return hidden


def _logits(scores: torch.Tensor, mask: torch.Tensor | None, options: Options) -> torch.Tensor:
    logits = scores * options.scale
    if mask is not None and mask.dtype != torch.bool:
        logits = logits + mask
    hidden = _hidden(scores, mask, options.is_causal)
    return logits if hidden is None else logits.masked_fill(hidden, float("-inf"))


def _log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    lse = torch.logsumexp(logits, -1)
    return torch.where(lse == float("-inf"), 0.0, lse)


def _survivors(
    shape: torch.Size, random_state: torch.Tensor | None, options: Options
) -> torch.Tensor | float:
    """What dropout multiplies the weights by: 0 or 1 / (1 - p)."""
    if random_state is None:
        return 1.0
    p = options.dropout_p
    mask = keep_mask(random_state, tuple(shape), dropout_p=p, index=options.index)
    return mask * survivor_scale(p)


def _weights_from_lse(
    scores: torch.Tensor, lse: torch.Tensor, rest: tuple[torch.Tensor, ...], options: Options
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """(weights before dropout, what dropout multiplies them by)."""
    mask, random_state = _rest(rest, options)
    weights = torch.exp(_logits(scores, mask, options) - lse[..., None])
    return weights, _survivors(scores.shape, random_state, options)


def _attention_probabilities(
    scores: torch.Tensor, *rest: torch.Tensor, out_dtype: str | None, **options: Any
) -> tuple[torch.Tensor, ...]:
    taken = Options(**options)
    lse = _log_sum_exp(_logits(scores, _rest(rest, taken)[0], taken))
    weights, survivors = _weights_from_lse(scores, lse, rest, taken)
    return weights * survivors, lse


def _attention_weights(
    scores: torch.Tensor,
    lse: torch.Tensor,
    *rest: torch.Tensor,
    out_dtype: str | None,
    **options: Any,
) -> torch.Tensor:
    weights, survivors = _weights_from_lse(scores, lse, rest, Options(**options))
    return weights * survivors


def _attention_score_gradient(
    scores: torch.Tensor,
    lse: torch.Tensor,
    grad_weights: torch.Tensor,
    grad: torch.Tensor,
    out: torch.Tensor,
    *rest: torch.Tensor,
    out_dtype: str | None,
    **options: Any,
) -> torch.Tensor:
    taken = Options(**options)
    weights, survivors = _weights_from_lse(scores, lse, rest, taken)
    correction = (grad * out).sum(-1, keepdim=True)
    return taken.scale * weights * (survivors * grad_weights - correction)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, ...]:
    scores = q @ k.mT
    weights, lse = _attention_probabilities(scores, *rest, out_dtype=None, **options)
    return weights @ v, lse


def _attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *rest: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    scores = q @ k.mT
    weights = _attention_weights(scores, lse, *rest, out_dtype=None, **options)
    grad_scores = _attention_score_gradient(
        scores, lse, grad @ v.mT, grad, out, *rest, out_dtype=None, **options
    )
    return grad_scores @ k, grad_scores.mT @ q, weights.mT @ grad


def _check_rest(op: str, rest: tuple[Tensor, ...], scores: Shape, options: Options) -> None:
    check_probability(op, "dropout_p", options.dropout_p)
    drops = options.dropout_p > 0
    if len(rest) != int(options.has_mask) + int(drops):
        raise OptionError(
            f"{op} has {len(rest)} optional tensors but has_mask={options.has_mask} and "
            f"dropout_p={options.dropout_p}, expected a mask if has_mask and a random_state if "
            "dropout_p > 0"
        )
    if options.has_mask:
        if rest[0].dtype != "bool":
            rest[0].expect_float()
        rest[0].expect_broadcastable(scores)
    if drops:
        check_state(op, rest[-1], scores, options.index)


def _check_qkv(op: str, q: Tensor, k: Tensor, v: Tensor) -> Shape:
    """Check the three and give the shape of their scores."""
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


@define("amp_ir.attention", "q", "k", "v", "mask?", "random_state?", meaning=_attention)
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
    """Attention: q, k, v, then the mask if `has_mask`, then random_state if `dropout_p` > 0.

    -> (out f[*batch, s, e] in the dtype of q, lse f32[*batch, s]).
    """
    scores = _check_qkv("amp_ir.attention", q, k, v)
    options = Options(has_mask, dropout_p, index, is_causal, scale)
    _check_rest("amp_ir.attention", rest, scores, options)
    out = q.with_shape((*q.shape[:-1], v.shape[-1]))
    return out, Tensor(scores[:-1], q.statistic_dtype)


@define(
    "amp_ir.attention_backward",
    "grad", "q", "k", "v", "out", "lse", "mask?", "random_state?",
    meaning=_attention_backward,
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
    """(dq, dk, dv) like q, k, v; grad and out f[*batch, s, e], lse f[*batch, s].

    The options and the optional arguments are those of the forward op. The mask has no gradient.
    """
    op = "amp_ir.attention_backward"
    scores = _check_qkv(op, q, k, v)
    options = Options(has_mask, dropout_p, index, is_causal, scale)
    _check_rest(op, rest, scores, options)
    expect_rest((grad, out), {"grad": True, "out": True}, (*q.shape[:-1], v.shape[-1]), op)
    lse.expect_float()
    lse.expect_shape(scores[:-1])
    return q.with_shape(q.shape), k.with_shape(k.shape), v.with_shape(v.shape)


def _check_scores(
    op: str, scores: Tensor, rest: tuple[Tensor, ...], out_dtype: str | None, options: Options
) -> Tensor:
    scores.expect_float()
    if scores.ndim < 2:
        scores.refuse("shape", "(*batch, rows, columns)")
    check_choice(op, "out_dtype", out_dtype, (None, *FLOAT_DTYPES))
    _check_rest(op, rest, scores.shape, options)
    return Tensor(scores.shape, out_dtype or scores.dtype)


@define(
    "amp_ir.attention_probabilities", "scores", "mask?", "random_state?",
    meaning=_attention_probabilities,
)  # fmt: skip
def attention_probabilities(
    scores: Tensor,
    *rest: Tensor,
    has_mask: bool,
    dropout_p: float,
    index: int,
    is_causal: bool,
    scale: float,
    out_dtype: str | None = None,
) -> tuple[Tensor, ...]:
    """Of scores = q k^T f[*batch, s, t]: (weights after dropout out_dtype[...], lse f32[..., s])."""
    options = Options(has_mask, dropout_p, index, is_causal, scale)
    weights = _check_scores("amp_ir.attention_probabilities", scores, rest, out_dtype, options)
    return weights, Tensor(scores.shape[:-1], scores.statistic_dtype)


@define(
    "amp_ir.attention_weights", "scores", "lse", "mask?", "random_state?",
    meaning=_attention_weights,
)  # fmt: skip
def attention_weights(
    scores: Tensor,
    lse: Tensor,
    *rest: Tensor,
    has_mask: bool,
    dropout_p: float,
    index: int,
    is_causal: bool,
    scale: float,
    out_dtype: str | None = None,
) -> Tensor:
    """The weights after dropout once more, from scores f[*batch, s, t] and lse f[*batch, s]."""
    lse.expect_float()
    lse.expect_shape(scores.shape[:-1])
    options = Options(has_mask, dropout_p, index, is_causal, scale)
    return _check_scores("amp_ir.attention_weights", scores, rest, out_dtype, options)


@define(
    "amp_ir.attention_score_gradient",
    "scores", "lse", "grad_weights", "grad", "out", "mask?", "random_state?",
    meaning=_attention_score_gradient,
)  # fmt: skip
def attention_score_gradient(
    scores: Tensor,
    lse: Tensor,
    grad_weights: Tensor,
    grad: Tensor,
    out: Tensor,
    *rest: Tensor,
    has_mask: bool,
    dropout_p: float,
    index: int,
    is_causal: bool,
    scale: float,
    out_dtype: str | None = None,
) -> Tensor:
    """The gradient of q k^T, out_dtype[*batch, s, t].

    scores and grad_weights = grad v^T f[*batch, s, t], lse f[*batch, s], grad and out
    f[*batch, s, e].
    """
    op = "amp_ir.attention_score_gradient"
    grad_weights.expect_float()
    grad_weights.expect_shape(scores.shape)
    lse.expect_float()
    lse.expect_shape(scores.shape[:-1])
    expect_rest((grad, out), {"grad": True, "out": True}, (*scores.shape[:-1], grad.shape[-1]), op)
    options = Options(has_mask, dropout_p, index, is_causal, scale)
    return _check_scores(op, scores, rest, out_dtype, options)
