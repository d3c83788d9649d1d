# SPDX-License-Identifier: Apache-2.0
"""Execution bears out what the padding proof claims of convolutions, pooling and recurrences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amp_ir.errors import PaddingError
from padded_models import ROWS, WIDTH, Made, Net, labels, training, vectors, words
from padded_steps import Case, check_claims, proof_of

CHANNELS = 4


def image_step(*layers: Callable[[], nn.Module]) -> Callable[[int], Made]:
    def make(rows: int) -> Made:
        model = nn.Sequential(
            *(layer() for layer in layers), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(3)
        )
        images = torch.randn(rows, 3, 9, 9)
        model(images)
        return training(model, lambda m, x, y: F.cross_entropy(m(x), y), (images, labels(rows)))

    return make


def conv(stride: int = 1, groups: int = 1, channels: int = 3) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(
        channels, CHANNELS, 3, stride=stride, padding=1, groups=groups, bias=True
    )


IMAGES: dict[str, Callable[[int], Made]] = {
    "conv": image_step(conv(), nn.ReLU),
    "strided and grouped": image_step(conv(2), nn.SiLU, conv(groups=2, channels=CHANNELS)),
    "transposed": image_step(lambda: nn.ConvTranspose2d(3, CHANNELS, 3, stride=2), nn.GELU),
    "max pool": image_step(conv(), lambda: nn.MaxPool2d(3, 2, padding=1, ceil_mode=True)),
    "average pool": image_step(conv(), lambda: nn.AvgPool2d(2, padding=1)),
    "adaptive max pool": image_step(conv(), lambda: nn.AdaptiveMaxPool2d(4)),
    "group norm": image_step(conv(), lambda: nn.GroupNorm(2, CHANNELS), nn.ReLU),
    "patches": image_step(lambda: nn.Conv2d(3, CHANNELS, 3, stride=3)),
}
LAST_BATCH = (({0: 0}, 0.5), ({0: 0}, -100.0))


@pytest.mark.parametrize("name", IMAGES)
def test_a_batch_of_images_is_proven(name: str) -> None:
    check_claims(Case(IMAGES[name], LAST_BATCH, lengths=((1,), (5,))))


def sized_images(*layers: Callable[[], nn.Module]) -> Case:
    """Return a step on images of varying height, padded with 0 and summed by a mask."""

    def make(side: int) -> Made:
        model = nn.Sequential(*(layer() for layer in layers))
        batch = torch.randn(2, 3, side, 4), torch.ones(2, 1, side, 4)
        return training(model, lambda m, x, mask: (m(x) * mask).sum(), batch)

    return Case(make, (({2: 0}, 0.0), ({2: 0}, 0.0)), lengths=((3,), (5,)))


def test_images_of_varying_size_are_proven_where_windows_read_zeros() -> None:
    check_claims(sized_images(conv(channels=3), nn.ReLU))


def test_images_of_varying_size_are_refused_where_windows_read_padding() -> None:
    leaks = proof_of(sized_images(conv(channels=3), lambda: nn.Conv2d(4, 4, 3, padding=1))).leaks
    assert any("windows reach over the end of dimension 0" in one for one in leaks)


def test_pools_of_images_of_varying_size_are_refused() -> None:
    leaks = proof_of(sized_images(conv(channels=3), lambda: nn.AvgPool2d(3, 1, 1))).leaks
    assert any("elements are mixed over" in one for one in leaks)


def test_a_sum_over_images_is_refused() -> None:
    def make(rows: int) -> Made:
        model = nn.Conv2d(3, 3, 3)
        batch = (torch.randn(rows, 3, 5, 5),)
        return training(model, lambda m, x: m(x).square().mean((1, 2, 3)).sum(), batch)

    leaks = proof_of(Case(make, (({0: 0}, 0.0),))).leaks
    assert any("where padding is not 0" in one for one in leaks)


class Recurrent(Net):
    """Words, a recurrent layer and scores."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.recurrent = kind(WIDTH, WIDTH, batch_first=True, **options)


KINDS: dict[str, Any] = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "RNN": nn.RNN,
}


def tagger(kind: Any, **options: Any) -> Callable[[int], Made]:
    """Return what makes a tagger that pads time, at the end."""

    def make(length: int) -> Made:
        def loss_of(m: Recurrent, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(m.head(m.recurrent(m.words(ids))[0]).flatten(0, 1), y.flatten())

        return training(Recurrent(kind, **options), loss_of, (words(length), labels(ROWS, length)))

    return make


def classifier(kind: Any, **options: Any) -> Callable[[int], Made]:
    """Return what makes a classifier of the last state that pads rows."""

    def make(rows: int) -> Made:
        def loss_of(m: Recurrent, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(m.head(m.recurrent(x)[0][:, -1, :WIDTH]), y)

        return training(Recurrent(kind, **options), loss_of, (vectors(4, rows), labels(rows)))

    return make


TAGGED = (({1: 0}, 0.0), ({1: 0}, -100.0))


@pytest.mark.parametrize("name", KINDS)
def test_time_may_be_padded_behind_the_data(name: str) -> None:
    check_claims(Case(tagger(KINDS[name]), TAGGED))


def test_layers_of_a_recurrence_may_be_padded() -> None:
    check_claims(Case(tagger(nn.LSTM, num_layers=2), TAGGED, lengths=((5,),)))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}], ids=["forward", "both"])
def test_rows_of_a_recurrence_may_be_padded(name: str, options: dict[str, Any]) -> None:
    check_claims(Case(classifier(KINDS[name], **options), LAST_BATCH, lengths=((1,), (5,))))


def leaks_of(make: Callable[[int], Made], pads: Any) -> str:
    proof = proof_of(Case(make, pads))
    with pytest.raises(PaddingError) as error:
        proof.conclusion()
    return str(error.value)


def test_a_recurrence_back_in_time_is_refused() -> None:
    def make(length: int) -> Made:
        def loss_of(m: Recurrent, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            made = m.recurrent(m.words(ids))[0][..., :WIDTH]
            return F.cross_entropy(m.head(made).flatten(0, 1), y.flatten())

        model = Recurrent(nn.LSTM, bidirectional=True)
        return training(model, loss_of, (words(length), labels(ROWS, length)))

    assert "time runs backwards over dimension 0, padding first" in leaks_of(make, TAGGED)


def test_the_last_state_of_padded_time_is_refused() -> None:
    def make(length: int) -> Made:
        def loss_of(m: Recurrent, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(m.head(m.recurrent(m.words(ids))[1][0][0]), y)

        return training(Recurrent(nn.LSTM), loss_of, (words(length), labels(ROWS)))

    leaks_of(make, (({1: 0}, 0.0), None))


def test_states_that_may_grow_over_padding_are_refused() -> None:
    text = leaks_of(tagger(nn.RNN, nonlinearity="relu"), TAGGED)
    assert "states may grow without bound over dimension 0" in text
