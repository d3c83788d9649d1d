# SPDX-License-Identifier: Apache-2.0
"""Steps whose losses are masked, or that read at the ends of sequences, as users write them.

Each function gives a number; a step that minimizes their sum is a test of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from padded_losses import logits, masked_mean
from padded_models import CLASSES, ROWS, WIDTH, Made, Net, training, words

_Loss = Callable[..., torch.Tensor]


def _first(m: Any, ids: torch.Tensor) -> torch.Tensor:
    return logits(m, ids)[..., 0]


def _each(k: torch.Tensor, losses: torch.Tensor) -> torch.Tensor:
    return (losses * k).sum() / k.sum()


# (model, ids: i64[rows, length], mask: f32[rows, length], y: f32[rows, length] in [0, 1]) -> loss
LOSSES: dict[str, _Loss] = {
    "bce of logits": lambda m, i, k, y: _each(
        k, F.binary_cross_entropy_with_logits(_first(m, i), y, reduction="none")
    ),
    "bce of logits, weighted": lambda m, i, k, y: (
        F.binary_cross_entropy_with_logits(_first(m, i), y, weight=k, reduction="sum") / k.sum()
    ),
    "bce of logits, weighted classes": lambda m, i, k, y: _each(
        k,
        F.binary_cross_entropy_with_logits(
            logits(m, i),
            y[..., None].expand(-1, -1, CLASSES),
            pos_weight=torch.tensor([1.0, 2.0, 3.0]),
            reduction="none",
        ).mean(-1),
    ),
    "bce": lambda m, i, k, y: (
        F.binary_cross_entropy(_first(m, i).sigmoid(), y, weight=k, reduction="sum") / k.sum()
    ),
    "squares of masked numbers": lambda m, i, k, y: F.mse_loss(
        _first(m, i) * k, y * k, reduction="sum"
    ),
    "distances of masked numbers": lambda m, i, k, y: F.smooth_l1_loss(
        _first(m, i) * k, y * k, reduction="sum"
    ),
    "distances": lambda m, i, k, y: _each(k, F.l1_loss(_first(m, i), y, reduction="none")),
    "divergence": lambda m, i, k, y: _each(
        k,
        F.kl_div(
            logits(m, i).log_softmax(-1),
            (logits(m, i).detach() * 3).softmax(-1),
            reduction="none",
        ).sum(-1),
    ),
    "density": lambda m, i, k, y: _each(
        k, F.gaussian_nll_loss(_first(m, i), y, F.softplus(logits(m, i)[..., 1]), reduction="none")
    ),
    "cosine": lambda m, i, k, y: _each(
        k, 1 - F.cosine_similarity(logits(m, i), m.words(i)[..., :CLASSES], dim=-1)
    ),
    "policy": lambda m, i, k, y: _each(k, -torch.exp(F.logsigmoid(_first(m, i)) - y)),
}


def _scores(x: torch.Tensor, k: torch.Tensor, number: float) -> torch.Tensor:
    return x.masked_fill(k[..., None] == 0, number)


# (model, x: f32[rows, length, width], mask: f32[rows, length]) -> f32[rows, width]
POOLS: dict[str, _Loss] = {
    "max of -inf": lambda m, x, k: _scores(x, k, -math.inf).max(1)[0],
    "max of -1e9": lambda m, x, k: _scores(x, k, -1e9).max(1).values,
    "max of the least number": lambda m, x, k: _scores(x, k, torch.finfo(x.dtype).min).max(1)[0],
    "max of a choice": lambda m, x, k: torch.where(k[..., None] > 0, x, -1e9).max(1)[0],
    "max of a sum": lambda m, x, k: (x + (1 - k[..., None]) * -1e9).max(1)[0],
    "largest": lambda m, x, k: _scores(x, k, -math.inf).amax(1),
    "largest of a norm": lambda m, x, k: _scores(m.norm(x), k, -1e9).amax(1),
    "logsumexp of -inf": lambda m, x, k: _scores(x, k, -math.inf).logsumexp(1),
    "logsumexp of -1e9": lambda m, x, k: _scores(x, k, -1e9).logsumexp(1),
    "logsumexp of a sum": lambda m, x, k: (x + (1 - k[..., None]) * -1e4).logsumexp(1),
    "logsumexp by hand": lambda m, x, k: (
        lambda s: (s - s.amax(1, keepdim=True).detach()).exp().sum(1).log() + s.amax(1)
    )(_scores(x, k, -math.inf)),
    "weights by hand": lambda m, x, k: (
        lambda w: (w[..., None] * x).sum(1) / w.sum(1, keepdim=True)
    )(
        (lambda s: (s - s.max(1, keepdim=True)[0]).exp() * k)(
            m.mix(x)[..., 0].masked_fill(k == 0, -1e9)
        )
    ),
}


def _places(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[1])[None]


def _at(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return x.gather(1, places[:, None, None].expand(-1, 1, x.shape[2]))[:, 0]


# (model, x: f32[rows, length, width], lengths: i64[rows]) -> f32[rows, width]
READS: dict[str, _Loss] = {
    "at the last places": lambda m, x, n: x[torch.arange(ROWS), n - 1],
    "at places that are clamped": lambda m, x, n: x[
        torch.arange(x.shape[0]), (n - 2).clamp(0, x.shape[1] - 1)
    ],
    "gathered": lambda m, x, n: _at(x, n - 1),
    "taken along": lambda m, x, n: x.take_along_dim((n - 1)[:, None, None], 1)[:, 0],
    "by one hot": lambda m, x, n: (x * F.one_hot(n - 1, x.shape[1])[..., None].float()).sum(1),
    "by an equality": lambda m, x, n: (x * (_places(x) == n[:, None] - 1)[..., None]).sum(1),
    "by a mask": lambda m, x, n: masked_mean(x, (_places(x) < n[:, None]).float()),
    "by a mask of the rest": lambda m, x, n: x.masked_fill(
        (_places(x) >= n[:, None])[..., None], -math.inf
    ).amax(1),
    "by a mask, turned": lambda m, x, n: masked_mean(x, (n[:, None] > _places(x)).float()),
    "by attention": lambda m, x, n: F.scaled_dot_product_attention(
        x[:, None], x[:, None], x[:, None], attn_mask=(_places(x) < n[:, None])[:, None, None]
    )[:, 0, 0],
    "at the last true place": lambda m, x, n: x[
        torch.arange(ROWS), (_places(x) * (_places(x) < n[:, None]).int()).argmax(-1)
    ],
    "at the sum of a mask": lambda m, x, n: _at(x, (_places(x) < n[:, None]).sum(1) - 1),
    "one set to 0": lambda m, x, n: masked_mean(
        x.scatter(1, (n - 1)[:, None, None].expand(-1, 1, WIDTH), 0.0),
        (_places(x) < n[:, None]).float(),
    ),
}


def masked_losses(names: Sequence[str] = tuple(LOSSES)) -> Callable[[int], Made]:
    """Return what makes a step that minimizes the sum of these losses."""

    def make(length: int) -> Made:
        def loss_of(m: Any, *given: torch.Tensor) -> torch.Tensor:
            return torch.stack([LOSSES[name](m, *given) for name in names]).sum()

        batch = words(length), torch.ones(ROWS, length), torch.rand(ROWS, length)
        return training(Net(), loss_of, batch)

    return make


def ends_of(length: int) -> torch.Tensor:
    """Return lengths of sequences of which the first is the longest, i64[rows]."""
    return torch.tensor([length, max(length - 2, 1)])


def reads(names: Sequence[str] = tuple(READS)) -> Callable[[int], Made]:
    """Return what makes a classifier of what these read: batches are ids and lengths, i64[rows]."""

    def make(length: int) -> Made:
        def loss_of(m: Any, ids: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(m.mix(m.words(ids)))
            return torch.stack(
                [m.head(READS[name](m, x, n)).square().sum() for name in names]
            ).sum()

        return training(Net(), loss_of, (words(length), ends_of(length)))

    return make


class PackedTagger(Net):
    """Words, a recurrent layer in both directions and scores."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.recurrent = kind(WIDTH, WIDTH, batch_first=True, bidirectional=True, **options)
        self.scores = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return scores of words plus those of the last states, f32[rows, length, classes]."""
        packed = pack_padded_sequence(
            self.words(ids), lengths, batch_first=True, enforce_sorted=False
        )
        out, last = self.recurrent(packed)
        out, _ = pad_packed_sequence(out, batch_first=True, total_length=ids.shape[1])
        state = last[0] if isinstance(last, tuple) else last
        return self.scores(out + torch.cat([state[-2], state[-1]], -1)[:, None])


def packed(kind: Any, **options: Any) -> Callable[[int], Made]:
    """Return what makes a tagger of packed sequences: batches are ids, lengths and labels."""

    def make(length: int) -> Made:
        def loss_of(
            m: nn.Module, ids: torch.Tensor, n: torch.Tensor, y: torch.Tensor
        ) -> torch.Tensor:
            return F.cross_entropy(m(ids, n).flatten(0, 1), y.flatten())

        labels = torch.randint(0, CLASSES, (ROWS, length))
        return training(
            PackedTagger(kind, **options), loss_of, (words(length), ends_of(length), labels)
        )

    return make
