# SPDX-License-Identifier: Apache-2.0
"""Execution bears out what the padding proof claims of windows, orders and choices over time.

Those that differ a little and leak are refused, each at its own line.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from amp_ir.errors import PaddingError
from padded_lengths import ends_of
from padded_losses import masked_mean
from padded_models import POOLED, ROWS, WIDTH, Made, Net, labels, training, vectors, words
from padded_steps import Case, check_claims, failures_of, proof_of

Part = Callable[..., torch.Tensor]


class Windows(Net):
    """A network with convolutions over time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.other = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.wide = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, dilation=2, groups=WIDTH)
        self.causal = nn.Conv1d(WIDTH, WIDTH, 3)


def sum_of(parts: Mapping[str, Part]) -> Part:
    return lambda *given: torch.stack([part(*given).sum() for part in parts.values()]).sum()


def step_of(loss_of: Part) -> Callable[[int], Made]:
    """Return what makes a step of (model, x: f32[rows, length, width], mask, lengths)."""

    def make(length: int) -> Made:
        def loss(m: Any, x: torch.Tensor, k: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            return loss_of(m, torch.tanh(m.mix(x)), k, n)

        ends = ends_of(length)
        mask = (torch.arange(length)[None] < ends[:, None]).float()
        return training(Windows(), loss, (vectors(length), mask, ends))

    return make


def over_time(layer: Part, x: torch.Tensor) -> torch.Tensor:
    return layer(x.transpose(1, 2)).transpose(1, 2)


def scores_of(m: Any, x: torch.Tensor, k: torch.Tensor, hidden: float) -> torch.Tensor:
    return m.head(x)[..., 0].masked_fill(k == 0, hidden)


def _each(k: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x * k[..., None]


def _distances(x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[1])
    return places[:, None] - places[None]


WINDOWS: dict[str, Part] = {
    "masked": lambda m, x, k, n: masked_mean(over_time(m.conv, _each(k, x)), k),
    "masked twice": lambda m, x, k, n: masked_mean(
        over_time(m.other, _each(k, over_time(m.conv, _each(k, x)).relu())), k
    ),
    "wide, of each channel": lambda m, x, k, n: masked_mean(over_time(m.wide, _each(k, x)), k),
    "causal": lambda m, x, k, n: masked_mean(over_time(m.causal, F.pad(x, (0, 0, 2, 0))), k),
    "the largest": lambda m, x, k, n: (
        over_time(m.conv, _each(k, x)).masked_fill(k[..., None] == 0, -math.inf).amax(1)
    ),
    "longer, and cut": lambda m, x, k, n: _each(
        k, over_time(lambda z: F.conv1d(z, m.conv.weight, padding=2), _each(k, x))[:, : x.shape[1]]
    ),
    "of one entry": lambda m, x, k, n: masked_mean(
        over_time(lambda z: F.conv1d(z, m.conv.weight[..., :1]), x), k
    ),
}
ORDERS: dict[str, Part] = {
    "the first 2": lambda m, x, k, n: x.masked_fill(k[..., None] == 0, -math.inf).topk(1, 1)[0],
    "the rows of the best": lambda m, x, k, n: x.gather(
        1, scores_of(m, x, k, -math.inf).topk(2, 1)[1][..., None].expand(-1, -1, WIDTH)
    ),
    "the smallest": lambda m, x, k, n: x.masked_fill(k[..., None] == 0, math.inf).topk(
        1, 1, largest=False
    )[0],
    "sorted": lambda m, x, k, n: x.masked_fill(k[..., None] == 0, -math.inf).sort(
        1, descending=True
    )[0][:, 0],
    "in the order of scores": lambda m, x, k, n: masked_mean(
        x.gather(
            1,
            scores_of(m, x, k, -math.inf)
            .argsort(1, descending=True)[..., None]
            .expand(-1, -1, WIDTH),
        ),
        k,
    ),
    "experts": lambda m, x, k, n: masked_mean(
        x * m.head(x).softmax(-1).topk(2, -1)[0].sum(-1, keepdim=True), k
    ),
    "the least": lambda m, x, k, n: x.masked_fill(k[..., None] == 0, math.inf).amin(1),
}
CHOICES: dict[str, Part] = {
    "a place": lambda m, x, k, n: F.cross_entropy(scores_of(m, x, k, -math.inf), n - 1),
    "a place, added mask": lambda m, x, k, n: F.cross_entropy(
        m.head(x)[..., 0] + (1 - k) * -1e9, n - 1, reduction="none"
    ),
    "a place or none": lambda m, x, k, n: F.cross_entropy(
        scores_of(m, x, k, -1e4), torch.where(n > 1, n - 1, -100)
    ),
    "a place, gathered": lambda m, x, k, n: (
        -scores_of(m, x, k, -math.inf).log_softmax(1).gather(1, n[:, None] - 1)
    ),
    "a list": lambda m, x, k, n: (
        -(scores_of(m, x, k, -1e9).log_softmax(1) * (k / k.sum(1, keepdim=True)))
    ),
}
OTHERS: dict[str, Part] = {
    "gates": lambda m, x, k, n: (torch.sigmoid(scores_of(m, x, k, -math.inf))[..., None] * x).sum(
        1
    ),
    "gates from 0": lambda m, x, k, n: (F.softplus(scores_of(m, x, k, -1e9))[..., None] * x).sum(1),
    "rows' logsumexp": lambda m, x, k, n: m.head(x).logsumexp(-1).square() * k,
    "sums so far": lambda m, x, k, n: _each(k, x.cumsum(1)),
    "means so far": lambda m, x, k, n: _each(
        k, x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
    ),
    "the last by a count of integers": lambda m, x, k, n: x[
        torch.arange(ROWS), k.long().sum(1) - 1
    ],
    "a mask of integers": lambda m, x, k, n: x * k.to(torch.int32)[..., None],
    "causal attention with -inf": lambda m, x, k, n: masked_mean(
        (x @ x.transpose(1, 2))
        .masked_fill(torch.ones(x.shape[1], x.shape[1]).tril() == 0, -math.inf)
        .softmax(-1)
        @ x,
        k,
    ),
    "causal attention to distances": lambda m, x, k, n: masked_mean(
        (x @ x.transpose(1, 2) - 0.1 * _distances(x))
        .masked_fill(_distances(x) < 0, -math.inf)
        .softmax(-1)
        @ x,
        k,
    ),
    "a decay": lambda m, x, k, n: _each(k, x * (0.9 ** torch.arange(x.shape[1]))[:, None]),
}
FAMILIES = {"windows": WINDOWS, "orders": ORDERS, "choices": CHOICES, "others": OTHERS}
LENGTHS = (({1: 0}, 0.0), ({1: 0}, 0.0), None)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_mask_hides_is_proven(name: str) -> None:
    check_claims(Case(step_of(sum_of(FAMILIES[name])), LENGTHS, lengths=((3,), (5,), (8,))))


@given(
    window=st.integers(1, 3),
    padding=st.integers(0, 3),
    dilation=st.integers(1, 2),
    is_masked=st.booleans(),
)
@settings(max_examples=8, deadline=None)
def test_windows_of_any_geometry_are_proven_where_they_read_zeros(
    window: int, padding: int, dilation: int, is_masked: bool
) -> None:
    def loss_of(m: Any, x: torch.Tensor, k: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        x = (_each(k, x) if is_masked else x).transpose(1, 2)
        weight = m.conv.weight[..., :window]
        return F.conv1d(x, weight, padding=padding, dilation=dilation)[..., 0].sum()

    case = Case(step_of(loss_of), LENGTHS, lengths=((5,), (7,)))
    if is_masked or not padding:
        check_claims(case)
    else:
        assert any("windows reach over the end" in one for one in proof_of(case).leaks)


@pytest.mark.parametrize(
    "function",
    [lambda x: F.softplus(x, beta=1e-4), lambda x: F.relu(-F.softplus(x, beta=-1.0))],
    ids=["small", "negative"],
)
def test_a_softplus_of_a_small_beta_hides_nothing(function: Any) -> None:
    leaks = proof_of(
        Case(
            step_of(lambda m, x, k, n: function(scores_of(m, x, k, -1e4)).sum()),
            LENGTHS,
        )
    ).leaks
    assert any("elements are added over dimension 0" in one for one in leaks)


LEAKS: dict[str, Part] = {
    "windows over padding": lambda m, x, k, n: (
        F.conv1d(x.transpose(1, 2), m.conv.weight, padding=1) * k[:, None]
    ).sum(),
    "windows over windows": lambda m, x, k, n: (
        F.conv1d(m.conv(_each(k, x).transpose(1, 2)), m.other.weight, padding=1) * k[:, None]
    ).sum(),
    "the best without a mask": lambda m, x, k, n: (x.topk(1, 1)[0]).sum(),
    "the best above other masks": lambda m, x, k, n: (
        scores_of(m, x, k, -1e9).masked_fill(m.table[: x.shape[1], 0] > 0, -math.inf).topk(2, 1)[0]
    ).sum(),
    "the smallest of -inf": lambda m, x, k, n: (
        x.masked_fill(k[..., None] == 0, -math.inf).sort(1)[0][:, 0]
    ).sum(),
    "the least of -inf": lambda m, x, k, n: (
        x.masked_fill(k[..., None] == 0, -math.inf).amin(1)
    ).sum(),
    "a place that is not hidden": lambda m, x, k, n: F.cross_entropy(m.head(x)[..., 0], n - 1),
    "a place of the model": lambda m, x, k, n: F.cross_entropy(
        scores_of(m, x, k, -math.inf), m.head(x)[:, 0, 0].long().clamp(min=0)
    ),
    "gates of padding": lambda m, x, k, n: (torch.sigmoid(m.head(x)[..., :1]) * x).sum(),
    "rows that may see nothing": lambda m, x, k, n: masked_mean(
        (x @ x.transpose(1, 2))
        .masked_fill((_distances(x) < 0) | (k[:, None] == 0), -math.inf)
        .softmax(-1)
        @ x,
        k,
    ).sum(),
    "what comes by -inf": lambda m, x, k, n: masked_mean(
        (x @ x.transpose(1, 2)).masked_fill(_distances(x) > 0, -math.inf).softmax(-1) @ x, k
    ).sum(),
    "sums of what comes": lambda m, x, k, n: (_each(k, x.flip(1).cumsum(1).flip(1))).sum(),
    "added to places": lambda m, x, k, n: (
        torch.zeros(ROWS, 64).scatter_add(1, k.long(), x[..., 0]) * 2.0
    ).sum(),
}


def test_windows_orders_and_choices_that_see_padding() -> None:
    def loss_of(m: Any, x: torch.Tensor, k: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return sum_of(LEAKS)(m, x, k, n)

    texts = list(proof_of(Case(step_of(loss_of), LENGTHS)).leaks)
    missed = []
    for name, leak in LEAKS.items():
        lines, first = inspect.getsourcelines(leak)
        places = [f"{__file__}:{first + k}:" for k in range(len(lines))]
        if not any(place in text for place in places for text in texts):
            missed.append(name)
    assert not missed, "\n".join([*missed, *texts])


def message_of(part: Part) -> str:
    with pytest.raises(PaddingError) as error:
        proof_of(Case(step_of(lambda *given: part(*given).sum()), LENGTHS)).conclusion()
    return str(error.value)


MESSAGES: dict[str, tuple[Part, str]] = {
    "windows": (
        LEAKS["windows over padding"],
        "amp_ir.conv: windows reach over the end of dimension 0, where padding is not 0: multiply "
        "what is convolved by the mask",
    ),
    "strides": (
        lambda m, x, k, n: F.conv1d(_each(k, x).transpose(1, 2), m.conv.weight, stride=2),
        "amp_ir.conv: windows over dimension 0 advance by 2, so that their number is no longer the "
        "length, or one that differs from it by the same everywhere. Use strides of 1, or do not "
        "pad this axis",
    ),
    "order": (
        LEAKS["the best without a mask"],
        "relax.topk: elements over dimension 0 are ordered, the largest first, and padding may be "
        "among those of data: fill it with -torch.inf",
    ),
    "order from the smallest": (
        LEAKS["the smallest of -inf"],
        "relax.argsort: elements over dimension 0 are ordered, the smallest first, and padding may "
        "be among those of data: fill it with torch.inf",
    ),
    "targets": (
        LEAKS["a place of the model"],
        "amp_ir.nll_loss: a loss has the classes dimension 0, padding included, and its targets "
        "may be padding. Compute them from the batch alone",
    ),
    "rows of NaN": (
        lambda m, x, k, n: (
            (x @ x.transpose(1, 2))
            .masked_fill(k[:, None] * k[..., None] == 0, -math.inf)
            .softmax(-1)
        ),
        "relax.nn.softmax: softmax of a row of padding in which everything is masked is NaN. Mask "
        "only what each row does not see, with -1e4, which is no infinity in float16 either, or "
        "use scaled_dot_product_attention, of which such a row is 0",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_refusal_says_what_to_do(name: str) -> None:
    part, text = MESSAGES[name]
    assert text in message_of(part)


def test_places_that_are_chosen_are_required_of_the_batch() -> None:
    case = Case(step_of(CHOICES["a place"]), LENGTHS)
    (condition,) = proof_of(case).conclusion().conditions
    batch = [torch.zeros(ROWS, 8, WIDTH), torch.zeros(ROWS, 8), torch.tensor([5, 3])]
    assert condition.holds(batch, {"dimension 0": 5})
    batch[2] = torch.tensor([6, 3])
    assert not condition.holds(batch, {"dimension 0": 5})


def test_pairs_of_a_batch_are_proven_where_a_mask_hides_its_padding() -> None:
    def make(rows: int) -> Made:
        def loss_of(m: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            is_row = y != -100
            scores = (m.mix(x) @ x.t()).masked_fill(~is_row[None], -math.inf)
            return F.cross_entropy(scores, torch.where(is_row, torch.arange(rows), -100))

        return training(Net(), loss_of, (torch.randn(rows, WIDTH), labels(rows)))

    check_claims(Case(make, (({0: 0}, 0.0), ({0: 0}, -100.0)), lengths=((2,), (5,))))


def test_sums_so_far_of_infinities_are_infinite_at_padding() -> None:
    def make(length: int) -> Made:
        def loss_of(m: Net, x: torch.Tensor, k: torch.Tensor, _y: torch.Tensor) -> torch.Tensor:
            x = m.mix(x).masked_fill(k[..., None] > 0, -math.inf)
            return (x.cumsum(1) * k[..., None]).sum()

        return training(Net(), loss_of, (vectors(length), torch.ones(ROWS, length), labels(ROWS)))

    case = Case(make, POOLED, lengths=((5,),))
    proof = proof_of(case)
    assert any("elements are added over" in one for one in proof.leaks)
    assert not [one for one in failures_of(case, proof) if "cumsum" in one and "padding" in one]


def test_ids_are_not_taken_for_masks() -> None:
    """The largest ids are no mask: data may be larger than a pad id of 50000."""

    def make(length: int) -> Made:
        def loss_of(m: Net, ids: torch.Tensor) -> torch.Tensor:
            return m.head(m.words(ids.amin(1) % 20)).square().sum()

        return training(Net(), loss_of, (words(length),))

    proof = proof_of(Case(make, (({1: 0}, 50000.0),)))
    assert any("the smallest element over dimension 0 is taken" in one for one in proof.leaks)
