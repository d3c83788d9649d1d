# SPDX-License-Identifier: Apache-2.0
"""Targets of the CTC loss that a mask selects, one after the other, and Tensor.masked_select."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir
from amp_ir.errors import SequenceLengthError
from compiled_steps import assert_compiled_alike
from step_comparison import Training, normal

TIME, CLASSES = 12, 7
# Of log-probabilities f[time, 3, classes] and labels int[3, 4], of which 0 are padding.
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
FRAMES = torch.tensor([12, 11, 12])


def selected(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute the loss as transformers does."""
    mask = (labels != -100) & (labels != 0)
    return F.ctc_loss(scores, labels.masked_select(mask), FRAMES, mask.sum(-1))


def given_twice(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    lengths = (labels > 0).sum(1)
    loss = nn.CTCLoss(reduction="none", zero_infinity=True)
    return loss(scores, labels[labels > 0], FRAMES, lengths).sum()


LOSSES: dict[str, Loss] = {
    "of masked_select": selected,
    "of an index": given_twice,
    "of a row for all": lambda scores, labels: F.ctc_loss(
        scores, labels.view(-1)[labels.view(-1) > 0], FRAMES, (labels > 0).sum(1), reduction="sum"
    ),
    "of other labels": lambda scores, labels: F.ctc_loss(
        scores, labels[labels > 0] - 1, FRAMES, (labels > 0).sum(1), blank=6
    ),
    "of bytes": lambda scores, labels: F.ctc_loss(
        scores, labels.int()[labels > 0], FRAMES.int(), (labels > 0).sum(1).int()
    ),
    "a mask of columns": lambda scores, labels: (
        scores.exp().sum(0).masked_select(labels[:, :1] > 2).square().sum()
    ),
    "a number of columns": lambda scores, labels: torch.masked_select(
        scores[0, :, :4], mask=labels > 2
    ).sum(),
}


def training(loss: Loss) -> Training:
    torch.manual_seed(0)
    model = nn.Linear(5, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        result = loss(model(x).log_softmax(-1), labels)
        result.backward()
        optimizer.step()
        return result.detach()

    return Training(model, optimizer, step)


def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return targets of other lengths for each index; one of none at the last."""
    labels = torch.tensor([[1, 5, 2, 2], [3, 0, 0, 0], [4, 0, 6, 0]]).roll(index, 0)
    labels[0, index:] = 0
    return normal(index, TIME, 3, 5), labels


@pytest.mark.parametrize("name", LOSSES)
def test_they_train_as_in_eager(name: str) -> None:
    assert assert_compiled_alike(lambda: training(LOSSES[name]), batch) == 1


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (
            [2, 1, 1],
            "target_lengths of ctc_loss add up to the number of labels that the mask selects, "
            "plus 0; got -1, in step (forward), ",
        ),
        (
            [5, 0, 0],
            "targets of ctc_loss have at most 4 labels, as each row of the mask that selects them "
            "(flatten labels and mask for longer ones); got 5, in step (forward), ",
        ),
    ],
)
def test_lengths_that_do_not_fit_change_nothing(lengths: list[int], message: str) -> None:
    model = nn.Linear(5, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        loss = F.ctc_loss(model(x).log_softmax(-1), y[y > 0], FRAMES, counts)
        loss.backward()
        optimizer.step()
        return loss.detach()

    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    batch = normal(0, TIME, 3, 5), torch.tensor([[1, 5, 0, 0], [3, 0, 0, 0], [4, 0, 6, 0]])
    train(*batch, torch.tensor([2, 1, 2]))
    before = model.weight.detach().clone()
    with pytest.raises(SequenceLengthError) as caught:
        train(*batch, torch.tensor(lengths))
    assert str(caught.value).startswith(message)
    torch.testing.assert_close(model.weight.detach(), before, rtol=0, atol=0)
