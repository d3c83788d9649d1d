# SPDX-License-Identifier: Apache-2.0
"""Padded steps with masked losses, lengths and packed sequences train as those without padding."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir
from padded_lengths import LOSSES, READS, PackedTagger, ends_of
from padded_models import CLASSES, ROWS, Net, words

# Sums have another order.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


Step = Callable[..., torch.Tensor]


def masked(m: Any) -> Step:
    return lambda ids, mask, y: torch.stack(
        [loss(m, ids, mask, y) for loss in LOSSES.values()]
    ).sum()


def reading(*names: str) -> Callable[[Any], Step]:
    def loss_of(m: Any) -> Step:
        def loss(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(m.mix(m.words(ids)))
            read = [m.head(READS[name](m, x, lengths)).square().sum() for name in names]
            return torch.stack(read).sum()

        return loss

    return loss_of


def tagging(m: Any) -> Step:
    return lambda ids, lengths, y: F.cross_entropy(m(ids, lengths).flatten(0, 1), y.flatten())


def masked_batch(length: int) -> tuple[torch.Tensor, ...]:
    mask = (torch.arange(length)[None] < ends_of(length)[:, None]).float()
    return words(length), mask, torch.rand(ROWS, length)


def read_batch(length: int) -> tuple[torch.Tensor, ...]:
    return words(length), ends_of(length)


def packed_batch(length: int) -> tuple[torch.Tensor, ...]:
    y = torch.randint(0, CLASSES, (ROWS, length))
    return words(length), ends_of(length).flip(0), y


LAST = "at the last places"
STEPS: dict[str, tuple[Callable[[], nn.Module], Any, Any, dict[str, float]]] = {
    "masked losses": (Net, masked, masked_batch, {"ids": 0, "mask": 0, "y": 0}),
    "reads": (Net, reading(*READS), read_batch, {"ids": 0}),
    "last read": (Net, reading(LAST), read_batch, {"ids": 0}),
    "packed": (lambda: PackedTagger(nn.LSTM), tagging, packed_batch, {"ids": 0, "y": -100}),
}


def pair(name: str) -> tuple[list[nn.Module], list[Step], Any]:
    """Return a model in PyTorch and one of `jit` with buckets, their steps, and its batches."""
    model_of, loss_of, batch_of, pad = STEPS[name]
    torch.manual_seed(0)
    plain = model_of()
    own = copy.deepcopy(plain)
    step, _ = minimizing(plain, loss_of(plain))
    to_compile, optimizer = minimizing(own, loss_of(own))
    buckets = {key: {1: (8, 16)} for key in pad}
    train = amp_ir.jit(to_compile, model=own, optimizer=optimizer, buckets=buckets, pad=pad)
    return [plain, own], [step, train], batch_of


def minimizing(model: nn.Module, loss_of: Step) -> tuple[Step, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    @functools.wraps(loss_of)
    def step(*batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, optimizer


def assert_same(models: list[nn.Module]) -> None:
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)


@pytest.mark.parametrize("name", ["masked losses", "reads", "packed"])
def test_padded_steps_train_as_in_pytorch_without_padding(name: str) -> None:
    models, (step, train), batch_of = pair(name)
    for length in (5, 8, 6, 7, 3):
        batch = batch_of(length)
        torch.testing.assert_close(train(*batch), step(*batch), **TOLERANCE)
    assert not train.recompiles  # one program for all
    assert_same(models)


def test_lengths_that_reach_padding_run_unpadded(caplog: pytest.LogCaptureFixture) -> None:
    """Python's x[-1] is the last of the data, not of the padding."""
    models, (step, train), _ = pair("last read")
    with caplog.at_level(logging.WARNING, logger="amp_ir"):
        for lengths in ([5, 3], [5, 0], [0, 5]):
            batch = words(5), torch.tensor(lengths)
            torch.testing.assert_close(train(*batch), step(*batch), **TOLERANCE)
    assert_same(models)
    (said,) = [one.message for one in caplog.records if "runs unpadded" in one.message]
    assert said.startswith(
        "a batch of 5 for axis 1 of ids runs unpadded, by a program of its own: it has numbers for "
        "amp_ir.index in step (forward), "
    )
    assert said.endswith(
        " that would reach padding, expected 0 to 1 less than the length of axis 1 of ids. "
        "Said once"
    )
