# SPDX-License-Identifier: Apache-2.0
"""Programs that differ a little from those that the padding proof accepts, and leak.

All of a family are in one step, and each has to be refused at its own line.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from padded_lengths import ends_of
from padded_losses import logits, masked_mean
from padded_models import POOLED, ROWS, WIDTH, Made, Net, labels, training, vectors, words
from padded_steps import Case, failures_of, proof_of

Leak = Callable[..., torch.Tensor]
BCE = F.binary_cross_entropy_with_logits


def assert_refused_at_their_lines(case: Case, leaks: Mapping[str, Leak]) -> None:
    texts = list(proof_of(case).leaks)
    missed = []
    for name, leak in leaks.items():
        lines, first = inspect.getsourcelines(leak)
        places = [f"{__file__}:{first + k}:" for k in range(len(lines))]
        if not any(place in text for place in places for text in texts):
            missed.append(name)
    assert not missed, "\n".join([*missed, *texts])


def sum_of(leaks: Mapping[str, Leak]) -> Leak:
    return lambda *given: torch.stack([leak(*given).sum() for leak in leaks.values()]).sum()


# (model, z: f32[rows, length] logits, mask, y: f32[rows, length]) -> loss
LOSSES: dict[str, Leak] = {
    "mask of the next": lambda m, z, k, y: (
        BCE(z[:, 1:], y[:, 1:], reduction="none") * k[:, :-1]
    ).sum(),
    "mean over padding": lambda m, z, k, y: (BCE(z, y, reduction="none") * k).mean(),
    "divided by the size": lambda m, z, k, y: (
        BCE(z, y, weight=k, reduction="sum") / k.numel()
    ).sum(),
    "the mask's opposite": lambda m, z, k, y: (F.mse_loss(z, y, reduction="none") * (1 - k)).sum(),
    "weights from 0.1 on": lambda m, z, k, y: (BCE(z, y, weight=k + 0.1, reduction="sum")).sum(),
    "labels without the mask": lambda m, z, k, y: (F.mse_loss(z * k, y + 1, reduction="sum")).sum(),
    "mean of masked numbers": lambda m, z, k, y: (F.l1_loss(z * k, y * k)).sum(),
    "a power that overflows": lambda m, z, k, y: (z.exp() * k).sum(),
    "a logarithm of 0": lambda m, z, k, y: ((z * k).abs().log() * k).sum(),
    "labels over the mask": lambda m, z, k, y: (F.mse_loss(z, y / k, reduction="none") * k).sum(),
    "the other branch": lambda m, z, k, y: (
        torch.where(k > 0, 0.0, BCE(z, y, reduction="none"))
    ).sum(),
    "no mask at all": lambda m, z, k, y: (F.softplus(z)).sum(),
    "numbers that are not NaN": lambda m, z, k, y: (torch.where(torch.isnan(z), 0.0, z)).sum(),
    "divergence of a mean": lambda m, z, k, y: F.kl_div(
        torch.stack([z, -z], -1).log_softmax(-1), y[..., None] + 0.1, reduction="batchmean"
    ),
}


def test_masked_losses_that_see_padding() -> None:
    def make(length: int) -> Made:
        def loss_of(m: Any, i: torch.Tensor, k: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return sum_of(LOSSES)(m, logits(m, i)[..., 0], k, y)

        batch = words(length), torch.ones(ROWS, length), torch.rand(ROWS, length)
        return training(Net(), loss_of, batch)

    pads = (({1: 0}, 0.0), ({1: 0}, 0.0), ({1: 0}, 0.0))
    assert_refused_at_their_lines(Case(make, pads), LOSSES)


def places(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[1])[None]


ROW = torch.arange(ROWS)
# (model, x: f32[rows, length, width], lengths: i64[rows]) -> anything of data and padding
READS: dict[str, Leak] = {
    "place of the largest": lambda m, x, n: (x[ROW, x.sum(-1).argmax(1)]).sum(),
    "place of the least": lambda m, x, n: (
        x[ROW, (x[..., 0] * (places(x) < n[:, None])).argmin(1)]
    ).sum(),
    "from the end": lambda m, x, n: (x[ROW, x.shape[1] - n]).sum(),
    "less the size": lambda m, x, n: (x[ROW, n - x.shape[1]]).sum(),
    "the last of all": lambda m, x, n: (x[ROW, torch.full((ROWS,), x.shape[1] - 1)]).sum(),
    "mask of the rest": lambda m, x, n: (x * (places(x) > n[:, None])[..., None]).sum(),
    "mask of one more": lambda m, x, n: (x * (places(x) - 1 < n[:, None])[..., None]).sum(),
    "mask of equal lengths": lambda m, x, n: (x * (places(x) != n[:, None])[..., None]).sum(),
    "mask from the end": lambda m, x, n: masked_mean(
        x, (torch.arange(x.shape[1] - 1, -1, -1)[None] < n[:, None]).float()
    ),
    "places that round": lambda m, x, n: (
        x * (places(x).bfloat16() < n[:, None] + 0.5)[..., None]
    ).sum(),
    "of the model": lambda m, x, n: (x[ROW, x[:, 0, 0].long().clamp(min=0)]).sum(),
    "of a product": lambda m, x, n: (x[ROW, (n * 0.999).long()]).sum(),
    "one set, all added": lambda m, x, n: (
        x.index_put((ROW, n - 1), torch.zeros(ROWS, WIDTH))
    ).sum(),
    "the first sorted": lambda m, x, n: (x.topk(1, 1)[0]).sum(),
}


def with_lengths(leaks: Mapping[str, Leak]) -> Callable[[int], Made]:
    def make(length: int) -> Made:
        def loss_of(m: Any, ids: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            return sum_of(leaks)(m, torch.tanh(m.mix(m.words(ids))), n)

        return training(Net(), loss_of, (words(length), ends_of(length)))

    return make


def test_reads_at_places_that_may_be_padding() -> None:
    case = Case(with_lengths(READS), (({1: 0}, 0.0), None), sizes=((300, 513),))
    assert_refused_at_their_lines(case, READS)


# (model, x: f32[rows, length, width], mask) -> anything of data and padding
POOLS: dict[str, Leak] = {
    "max of zeros": lambda m, x, k: ((x * k[..., None]).max(1)[0]).sum(),
    "max of what is masked": lambda m, x, k: (
        x.masked_fill(k[..., None] == 1, -math.inf).amax(1)
    ).sum(),
    "min of -inf": lambda m, x, k: (x.masked_fill(k[..., None] == 0, -math.inf).amin(1)).sum(),
    "max of another mask": lambda m, x, k: (x.masked_fill(m.table[0] > 0, -math.inf).amax(1)).sum(),
    "max of -100": lambda m, x, k: ((x * 99).masked_fill(k[..., None] == 0, -100.0).amax(1)).sum(),
    "logsumexp without a mask": lambda m, x, k: (x.logsumexp(1)).sum(),
    "logsumexp of zeros": lambda m, x, k: ((x * k[..., None]).logsumexp(1)).sum(),
    "logsumexp of -100": lambda m, x, k: (
        x.masked_fill(k[..., None] == 0, -100.0).logsumexp(1)
    ).sum(),
    "powers less the max of all": lambda m, x, k: ((x - x.amax(1, keepdim=True)).exp()).sum(),
    "powers of a tenth": lambda m, x, k: (((x + (1 - k[..., None]) * -1e4) / 1e3).exp()).sum(),
    "masked and back": lambda m, x, k: (((x - 1e4 * (1 - k[..., None])) + 1e4).exp()).sum(),
    "where it is largest": lambda m, x, k: (x == x.amax(1, keepdim=True)).sum(),
    "bounded after the mask": lambda m, x, k: ((x + (1 - k[..., None]) * -1e4).tanh()).sum(),
    "softmax of the width": lambda m, x, k: (
        x.masked_fill(k[..., None] == 0, -1e9).softmax(-1)
    ).sum(),
}


def test_pools_that_see_padding() -> None:
    def make(length: int) -> Made:
        def loss_of(m: Any, x: torch.Tensor, k: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return sum_of(POOLS)(m, torch.tanh(m.mix(x)), k) * y.sum()

        return training(Net(), loss_of, (vectors(length), torch.ones(ROWS, length), labels(ROWS)))

    assert_refused_at_their_lines(Case(make, POOLED), POOLS)


class Recurrent(Net):
    """Recurrent layers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.both = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.rnn = nn.RNN(WIDTH, WIDTH, batch_first=True, nonlinearity="relu")


def pack(x: torch.Tensor, lengths: torch.Tensor) -> Any:
    return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)


# (model, x: f32[rows, length, width], lengths: i64[rows]) -> anything of data and padding
RECURRENCES: dict[str, Leak] = {
    "backward in time": lambda m, x, n: (m.both(x)[0][..., WIDTH:][:, 0]).sum(),
    "both directions": lambda m, x, n: (
        masked_mean(m.gru(x)[0], (places(x) < n[:, None]).float())
    ).sum(),
    "the last state": lambda m, x, n: (m.lstm(x)[1][0][0]).sum(),
    "the last cell": lambda m, x, n: (m.lstm(x)[1][1][0]).sum(),
    "the last output": lambda m, x, n: (m.lstm(x)[0][:, -1]).sum(),
    "all outputs": lambda m, x, n: (m.lstm(x)[0]).sum(),
    "reversed before": lambda m, x, n: (m.lstm(x.flip(1))[0][:, 0]).sum(),
    "states without a bound": lambda m, x, n: (m.rnn(x)[0][:, 0]).sum(),
    "as long as the padding": lambda m, x, n: (m.lstm(pack(x, n * 0 + x.shape[1]))[1][0][0]).sum(),
    "filled with 1": lambda m, x, n: (
        pad_packed_sequence(
            m.lstm(pack(x, n))[0], batch_first=True, padding_value=1.0, total_length=x.shape[1]
        )[0]
    ).sum(),
    "as the longest": lambda m, x, n: (
        pad_packed_sequence(m.gru(pack(x, n))[0], batch_first=True)[0]
    ).sum(),
    "reversed and packed": lambda m, x, n: (m.lstm(pack(x.flip(1), n))[1][0][0]).sum(),
    "the mean of all steps": lambda m, x, n: (
        pad_packed_sequence(m.both(pack(x, n))[0], batch_first=True, total_length=x.shape[1])[
            0
        ].mean(1)
    ).sum(),
}


def test_recurrences_that_see_padding() -> None:
    def make(length: int) -> Made:
        def loss_of(m: Any, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            return sum_of(RECURRENCES)(m, x, n)

        return training(Recurrent(), loss_of, (vectors(length), ends_of(length)))

    assert_refused_at_their_lines(Case(make, (({1: 0}, 0.0), None)), RECURRENCES)


def test_rows_of_padding_that_overflow_are_refused() -> None:
    """In a row of padding all is masked: its maximum is -3e38, of which a square is infinite."""

    def make(length: int, rows: int) -> Made:
        def loss_of(m: Any, x: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            least = torch.finfo(x.dtype).min
            pooled = torch.tanh(m.mix(x)).masked_fill(k[..., None] == 0, least).max(1)[0]
            return (m.head(pooled).square().sum(-1) * w).sum()

        return training(
            Net(), loss_of, (vectors(length, rows), torch.ones(rows, length), torch.ones(rows))
        )

    pads = (({0: 1, 1: 0}, 0.0), ({0: 1, 1: 0}, 0.0), ({0: 1}, 0.0))
    leaks = proof_of(Case(make, pads, sizes=((8, 13), (3, 7)))).leaks
    assert any("it may be infinite or NaN there" in one for one in leaks)


def test_weights_of_rows_of_padding_are_not_taken_for_0() -> None:
    """In a row of padding, where each score is hidden, they are not far below their logsumexp."""

    def make(length: int, rows: int) -> Made:
        def loss_of(m: Any, x: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            pooled = (torch.tanh(m.mix(x)) + (1 - k[..., None]) * -1e4).logsumexp(1)
            return (m.head(pooled).square().sum(-1) * w).sum()

        return training(
            Net(), loss_of, (vectors(length, rows), torch.ones(rows, length), torch.ones(rows))
        )

    pads = (({0: 1, 1: 0}, 0.0), ({0: 1, 1: 0}, 0.0), ({0: 1}, 0.0))
    case = Case(make, pads, sizes=((8, 13), (3, 7)), lengths=((5, 2),))
    assert not list(failures_of(case, proof_of(case)))
