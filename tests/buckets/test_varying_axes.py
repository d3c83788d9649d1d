# SPDX-License-Identifier: Apache-2.0
"""`buckets="auto"`: axes whose lengths differ between calls are padded where that is inert."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import amp_ir
from amp_ir.errors import CaptureError, IndexOutOfRangeError, OptionError

WORDS, PLACES = 50, 40
PAD = {"ids": 0, "mask": 0, "labels": -100}
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}  # float32 sums in another order


class Tagger(nn.Module):
    """Attention over a sequence of at most PLACES entries."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.places = nn.Embedding(PLACES, 16)
        self.mix = nn.MultiheadAttention(16, 2, batch_first=True)
        self.scores = nn.Linear(16, WORDS)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        mixed, _ = self.mix(x, x, x, key_padding_mask=mask == 0, need_weights=False)
        return self.scores(x + mixed)


def batch_of(rows: int, length: int) -> tuple[torch.Tensor, ...]:
    ids = torch.randint(1, WORDS, (rows, length))
    return ids, torch.ones_like(ids), torch.randint(0, WORDS, (rows, length))


def training(step_of, pad=PAD, **options):
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = step_of(model, optimizer)
    if not options:
        return step
    return amp_ir.jit(step, model=model, optimizer=optimizer, pad=pad, **options)


def masked(model, optimizer):
    def step(ids, mask, labels):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(ids, mask).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def mean_over_rows(model, optimizer):
    """Padding in axis 1 changes nothing, in axis 0 it does."""

    def step(ids, mask, labels):
        optimizer.zero_grad()
        scores = model(ids, mask).transpose(1, 2)
        loss = functional.cross_entropy(scores, labels, reduction="none").sum(1).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def assert_trains_as_eager(step_of, shapes, train):
    step = training(step_of)
    for shape in shapes:
        batch = batch_of(*shape)
        torch.testing.assert_close(train(*batch), step(*batch), **TOLERANCE)


def test_axes_that_vary_are_padded():
    train = training(masked, buckets="auto")
    # The first length is a size, then there are powers of 2.
    assert_trains_as_eager(masked, [(4, 10), (4, 12), (4, 7), (4, 15), (4, 20), (4, 10)], train)
    assert len(train.recompiles) + 1 == 3  # 10, 16, 32


def test_a_last_batch_is_padded_to_the_first_ones_rows():
    train = training(masked, buckets="auto")
    assert_trains_as_eager(masked, [(8, 10), (8, 10), (5, 10), (8, 10), (3, 10)], train)
    assert len(train.recompiles) == 0


def test_an_axis_whose_padding_shows_is_left_alone(caplog):
    train = training(mean_over_rows, buckets="auto")
    shapes = [(8, 10), (8, 12), (5, 12), (8, 14), (5, 16), (8, 9)]
    assert_trains_as_eager(mean_over_rows, shapes, train)
    assert len(train.recompiles) + 1 == 3  # (8, 10), (8, 16), (5, 16)
    (warning,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    text = warning.getMessage()
    assert text.startswith(
        "axis 0 of ids and axis 0 of mask and axis 0 of labels is not padded: batches that differ "
        "there have programs of their own. Said once. "
    )
    assert "mean" in text and "test_varying_axes.py" in text


def test_an_axis_that_other_tensors_share_is_left_alone(caplog):
    def step_of(model, optimizer):
        inner = masked(model, optimizer)

        def step(ids, mask, labels, weights):
            loss = inner(ids, mask, labels)
            return loss * weights.mean()

        return step

    step, train = training(step_of), training(step_of, buckets="auto")
    for rows, length in [(8, 10), (8, 12), (5, 12), (8, 14), (5, 16)]:
        batch = *batch_of(rows, length), torch.rand(rows)
        torch.testing.assert_close(train(*batch), step(*batch), **TOLERANCE)
    assert len(train.recompiles) + 1 == 3
    (warning,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert warning.getMessage() == (
        "axis 0 of ids and axis 0 of mask and axis 0 of labels varies together with a tensor that "
        "pad= has no number for. Batches that differ there have programs of their own. Said once"
    )


def test_sizes_that_the_step_cannot_have_are_not_chosen():
    """A power of 2 may be longer than the table of positions."""
    train = training(masked, buckets="auto")
    assert_trains_as_eager(masked, [(4, 10), (4, 33), (4, 37), (4, 40), (4, 34)], train)
    assert len(train.recompiles) + 1 == 2  # 10 and 40
    with pytest.raises(IndexOutOfRangeError, match="expected 0 to 39"):
        train(*batch_of(4, 41))
    assert_trains_as_eager(masked, [(4, 10)], training(masked, buckets="auto"))


def test_a_chosen_size_of_one_axis_may_be_too_long():
    sizes = {name: {1: "auto"} for name in PAD}
    train = training(masked, buckets=sizes)
    assert_trains_as_eager(masked, [(4, 33), (4, 37), (4, 7)], train)
    assert len(train.recompiles) + 1 == 1  # 40


def test_auto_needs_numbers_to_pad_with():
    message = 'buckets="auto" pads the arguments for which pad= has a number, and it has none'
    with pytest.raises(OptionError) as error:
        training(masked, pad={}, buckets="auto")
    assert str(error.value) == message
    with pytest.raises(OptionError, match="buckets= is 'all', expected .*, or \"auto\""):
        training(masked, buckets="all")
    with pytest.raises(OptionError, match="pad= is 0, expected a number by argument"):
        training(masked, pad=0, buckets="auto")


def test_a_tensor_without_padding_is_named():
    sizes = {name: {1: (8, 16)} for name in ("ids", "mask")}
    train = training(masked, pad={"ids": 0, "mask": 0}, buckets=sizes)
    with pytest.raises(CaptureError) as error:
        train(*batch_of(3, 5))
    assert re.sub(r"/\S+:\d+", "FILE", str(error.value)) == (
        "the step can be captured on this batch, but not padded to its bucket (8 for axis 1 of "
        "ids, which has 5 entries): the step failed while it was traced, at step (forward), FILE: "
        "ValueError: Expected input batch_size (24) to match target batch_size (15). Axis 1 of "
        "labels has 5 entries too, and buckets= does not pad it: if it is the same dimension, add "
        "'labels': {1: (8, 16)} to buckets=, and for 'labels' a number to pad=, such as 0 for a "
        "mask or -100 for labels"
    )
