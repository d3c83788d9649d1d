# SPDX-License-Identifier: Apache-2.0
"""Steps whose padding is masked, as users write them: by name, what computes their loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from padded_models import CLASSES, ROWS, WIDTH


def masked_mean(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Average f32[rows, length, width] over the length, where the mask is 1."""
    return (x * k[..., None]).sum(1) / k.sum(1, keepdim=True)


def attend(
    x: torch.Tensor, _k: torch.Tensor, mask: torch.Tensor | None = None, causal: bool = False
) -> torch.Tensor:
    """Attend with one head."""
    q = x[:, None]
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=causal)[:, 0]


def scores_attend(
    x: torch.Tensor, k: torch.Tensor, masked: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Attend by hand: `masked` takes the scores."""
    scores = masked(x @ x.transpose(1, 2) / math.sqrt(x.shape[-1]))
    return masked_mean(scores.softmax(-1) @ x, k)


def logits(m: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the scores of classes, f32[rows, length, classes]."""
    return m.head(m.norm(m.mix(m.words(ids))))


# (model, x: f32[rows, length, width], mask: f32[rows, length]) -> f32[rows, width]
POOLS: dict[str, Callable[..., torch.Tensor]] = {
    "mean_pool": lambda m, x, k: (x * k[..., None]).sum(1) / k.sum(1, keepdim=True),
    "mean_pool_clamp": lambda m, x, k: (
        (x * k.unsqueeze(-1)).sum(1) / k.sum(1, keepdim=True).clamp(min=1e-9)
    ),
    "attn_pool_inf": lambda m, x, k: (
        m.norm(x).mean(-1).masked_fill(k == 0, -math.inf).softmax(-1)[..., None] * x
    ).sum(1),
    "exp_norm": lambda m, x, k: (
        ((x.sum(-1).tanh().exp() * k)[..., None] * x).sum(1)
        / (x.sum(-1).tanh().exp() * k).sum(1, keepdim=True)
    ),
    "sdpa_bool": lambda m, x, k: masked_mean(attend(x, k, k.bool()[:, None, None, :]), k),
    "sdpa_inf": lambda m, x, k: masked_mean(
        attend(x, k, torch.zeros_like(k).masked_fill(k == 0, -math.inf)[:, None, None, :]), k
    ),
    "sdpa_causal_and_mask": lambda m, x, k: masked_mean(
        attend(
            x,
            k,
            torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None, None]
            & k.bool()[:, None, None, :],
        ),
        k,
    ),
    "manual_fill_1e9": lambda m, x, k: scores_attend(
        x, k, lambda s: s.masked_fill(k[:, None, :] == 0, -1e9)
    ),
    "layernorm": lambda m, x, k: masked_mean(m.norm(x), k),
    "alibi": lambda m, x, k: scores_attend(
        x,
        k,
        lambda s: (
            s - (torch.arange(s.shape[-1])[:, None] - torch.arange(s.shape[-1])[None]).abs() * 0.1
        ).masked_fill(k[:, None, :] == 0, -1e9),
    ),
    "pos_cumsum_hf": lambda m, x, k: masked_mean(
        x + m.places((torch.cumsum(k, 1).type_as(k) * k).long() + 1), k
    ),
    "rotary": lambda m, x, k: (
        lambda c, s: masked_mean(
            attend(
                x * c + torch.cat([-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]], -1) * s,
                k,
                k.bool()[:, None, None, :],
            ),
            k,
        )
    )(
        *(lambda t: (t.cos(), t.sin()))(
            torch.cat([torch.arange(x.shape[1])[:, None] * torch.ones(WIDTH // 2) * 0.3] * 2, -1)
        )
    ),
    "moe": lambda m, x, k: (
        lambda g: masked_mean(g[..., :1] * m.mix(x) + g[..., 1:] * m.norm(x), k)
    )(m.mix(x)[..., :2].softmax(-1)),
    "shift_pad": lambda m, x, k: masked_mean(F.pad(x[:, :-1], (0, 0, 1, 0)), k),
    "cls_concat": lambda m, x, k: (lambda y, kk: attend(y, kk, kk.bool()[:, None, None, :])[:, 0])(
        torch.cat([m.table[:1].expand(ROWS, 1, WIDTH), x], 1),
        torch.cat([torch.ones(ROWS, 1), k], 1),
    ),
    "bmm_mask": lambda m, x, k: torch.bmm((k / k.sum(1, keepdim=True))[:, None], x)[:, 0],
    "one_hot": lambda m, x, k: masked_mean(x * F.one_hot(k.long(), WIDTH).float(), k),
    "norm_all": lambda m, x, k: masked_mean(x, k) / ((x * k[..., None]).norm()),
    "attn_gqa_mlp": lambda m, x, k: masked_mean(
        m.norm(x + F.gelu(m.mix(attend(x, k, k.bool()[:, None, None, :])))), k
    ),
    "attention_added_mask": lambda m, x, k: scores_attend(
        x, k, lambda s: s + (1 - k[:, None]) * -1e9
    ),
    "attention_filled_with_inf": lambda m, x, k: scores_attend(
        x, k, lambda s: s.masked_fill(k[:, None] == 0, -math.inf)
    ),
    "attention_by_rows_and_keys": lambda m, x, k: scores_attend(
        x, k, lambda s: s.masked_fill(k[:, None] * k[..., None] == 0, -1e4)
    ),
    "pool_added_mask": lambda m, x, k: torch.einsum(
        "bl,bld->bd", (x.sum(-1) + (1 - k) * torch.finfo(x.dtype).min).softmax(-1), x
    ),
    "attention_causal": lambda m, x, k: scores_attend(
        x, k, lambda s: s.masked_fill(torch.ones(s.shape[1], s.shape[1]).triu(1).bool(), -1e9)
    ),
    "places_in_a_table": lambda m, x, k: masked_mean(x + m.table[: x.shape[1]], k),
}
# (model, ids: i64[rows, length], mask, labels: i64[rows, length]) -> loss
LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "ce_flat": lambda m, i, k, y: F.cross_entropy(logits(m, i).view(-1, CLASSES), y.view(-1)),
    "ce_none": lambda m, i, k, y: (
        (F.cross_entropy(logits(m, i).transpose(1, 2), y, reduction="none") * k).sum() / k.sum()
    ),
    "ce_none_flat": lambda m, i, k, y: (
        (
            F.cross_entropy(logits(m, i).flatten(0, 1), y.flatten(), reduction="none") * k.flatten()
        ).sum()
        / k.sum()
    ),
    "ce_none_noignore": lambda m, i, k, y: (
        (F.cross_entropy(logits(m, i).transpose(1, 2), y.clamp(min=0), reduction="none") * k).sum()
        / k.sum()
    ),
    "ce_smooth": lambda m, i, k, y: F.cross_entropy(
        logits(m, i).view(-1, CLASSES), y.view(-1), label_smoothing=0.1
    ),
    "ce_shift": lambda m, i, k, y: F.cross_entropy(
        logits(m, i)[:, :-1].reshape(-1, CLASSES), y[:, 1:].reshape(-1)
    ),
    "ce_shift_pad": lambda m, i, k, y: F.cross_entropy(
        logits(m, i).reshape(-1, CLASSES), F.pad(y, (0, 1), value=-100)[:, 1:].reshape(-1)
    ),
    "gather_logp": lambda m, i, k, y: (
        -(logits(m, i).log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0] * k).sum()
        / k.sum()
    ),
    "bce_probs": lambda m, i, k, y: (
        (
            F.binary_cross_entropy(
                torch.sigmoid(logits(m, i)[..., 0]), (y > 0).float(), reduction="none"
            )
            * k
        ).sum()
        / k.sum()
    ),
    "mse_mask": lambda m, i, k, y: (
        (F.mse_loss(logits(m, i)[..., 0], y.float(), reduction="none") * k).sum() / k.sum()
    ),
    "acc": lambda m, i, k, y: (
        F.cross_entropy(logits(m, i).transpose(1, 2), y)
        + 0 * (((logits(m, i).argmax(-1) == y) & (y != -100)).sum() / (y != -100).sum())
    ),
    "tied": lambda m, i, k, y: F.cross_entropy(
        (m.words(i) @ m.words.weight.t()).transpose(1, 2), torch.where(y < 0, y, i)
    ),
    "focal": lambda m, i, k, y: (lambda ce: (((1 - torch.exp(-ce)) ** 2 * ce) * k).sum() / k.sum())(
        F.cross_entropy(logits(m, i).transpose(1, 2), y, reduction="none")
    ),
}
