# SPDX-License-Identifier: Apache-2.0
"""The softmax-like ops between the matmuls of attention, into which dispatch decomposes it.

All of them start from scores = q k^T f[*batch, s, t] and do scale, mask, causal mask, softmax and
dropout in one kernel. attention.py defines the options and a row that sees nothing.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from amp_ir.dialect.define import FLOAT_DTYPES, Shape, Tensor, check_choice, define, expect_rest
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
    """Return (mask, random_state) of the arguments that may be absent."""
    mask = rest[0] if options.has_mask else None
    return mask, rest[-1] if options.dropout_p > 0 else None


def _hidden(
    scores: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
) -> torch.Tensor | None:
    """Return bool: the places that a row does not see, or None for none."""
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
    """Return the factor of dropout for the weights: 0 or 1 / (1 - p)."""
    if random_state is None:
        return 1.0
    p = options.dropout_p
    mask = keep_mask(random_state, tuple(shape), dropout_p=p, index=options.index)
    return mask * survivor_scale(p)


def _weights_from_lse(
    scores: torch.Tensor, lse: torch.Tensor, rest: tuple[torch.Tensor, ...], options: Options
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return (weights before dropout, the factor of dropout)."""
    mask, random_state = _rest(rest, options)
    weights = torch.exp(_logits(scores, mask, options) - lse[..., None])
    return weights, _survivors(scores.shape, random_state, options)


def attention_probabilities_of(
    scores: torch.Tensor, *rest: torch.Tensor, out_dtype: str | None, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Compute `amp_ir.attention_probabilities` with PyTorch."""
    taken = Options(**options)
    lse = _log_sum_exp(_logits(scores, _rest(rest, taken)[0], taken))
    weights, survivors = _weights_from_lse(scores, lse, rest, taken)
    return weights * survivors, lse


def attention_weights_of(
    scores: torch.Tensor,
    lse: torch.Tensor,
    *rest: torch.Tensor,
    out_dtype: str | None,
    **options: Any,
) -> torch.Tensor:
    """Compute `amp_ir.attention_weights` with PyTorch."""
    weights, survivors = _weights_from_lse(scores, lse, rest, Options(**options))
    return weights * survivors


def attention_score_gradient_of(
    scores: torch.Tensor,
    lse: torch.Tensor,
    grad_weights: torch.Tensor,
    grad: torch.Tensor,
    out: torch.Tensor,
    *rest: torch.Tensor,
    out_dtype: str | None,
    **options: Any,
) -> torch.Tensor:
    """Compute `amp_ir.attention_score_gradient` with PyTorch."""
    taken = Options(**options)
    weights, survivors = _weights_from_lse(scores, lse, rest, taken)
    correction = (grad * out).sum(-1, keepdim=True)
    return taken.scale * weights * (survivors * grad_weights - correction)


def check_rest(op: str, rest: tuple[Tensor, ...], scores: Shape, options: Options) -> None:
    """Require the mask and the random state that `options` call for, and no more."""
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


def _check_scores(
    op: str, scores: Tensor, rest: tuple[Tensor, ...], out_dtype: str | None, options: Options
) -> Tensor:
    scores.expect_float()
    if scores.ndim < 2:
        scores.refuse("shape", "(*batch, rows, columns)")
    check_choice(op, "out_dtype", out_dtype, (None, *FLOAT_DTYPES))
    check_rest(op, rest, scores.shape, options)
    return Tensor(scores.shape, out_dtype or scores.dtype)


@define(
    "amp_ir.attention_probabilities", "scores", "mask?", "random_state?",
    reference=attention_probabilities_of,
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
    """Return the weights after dropout, out_dtype[*batch, s, t], and lse f32[*batch, s].

    `scores` is q k^T.
    """
    options = Options(has_mask, dropout_p, index, is_causal, scale)
    weights = _check_scores("amp_ir.attention_probabilities", scores, rest, out_dtype, options)
    return weights, Tensor(scores.shape[:-1], scores.statistic_dtype)


@define(
    "amp_ir.attention_weights", "scores", "lse", "mask?", "random_state?",
    reference=attention_weights_of,
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
    """Recompute the weights after dropout from scores f[*batch, s, t] and lse f[*batch, s]."""
    lse.expect_float()
    lse.expect_shape(scores.shape[:-1])
    options = Options(has_mask, dropout_p, index, is_causal, scale)
    return _check_scores("amp_ir.attention_weights", scores, rest, out_dtype, options)


@define(
    "amp_ir.attention_score_gradient",
    "scores", "lse", "grad_weights", "grad", "out", "mask?", "random_state?",
    reference=attention_score_gradient_of,
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
    """Return the gradient of q k^T, out_dtype[*batch, s, t].

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
