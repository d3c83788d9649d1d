# SPDX-License-Identifier: Apache-2.0
"""What those who write their first step are told, and that it works when they do so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import amp_ir
from amp_ir.errors import CaptureError


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(4)
    model = nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


X = torch.linspace(-1, 1, 20).reshape(5, 4)


def test_a_step_without_backward_that_was_given_an_optimizer_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, optimizer = parts()
    caplog.set_level(logging.INFO, logger="amp_ir")
    forward = amp_ir.jit(lambda x: model(x).square().mean(), model=model, optimizer=optimizer)
    assert not forward(X).requires_grad and not forward(X[:2]).requires_grad
    told = (
        "The step was given an optimizer, and returns a tensor that requires a gradient without "
        "calling backward(); results of a compiled step have no gradient, so that backward() after "
        "it trains nothing. Call backward() and optimizer.step() inside of the step, compile the "
        'model alone with torch.compile(model, backend="amp_ir"), or call a step that only '
        "evaluates under torch.no_grad()."
    )
    levels = [one.levelno for one in caplog.records if one.getMessage() == told]
    assert levels == [logging.WARNING, logging.INFO]  # once, and then beside the other notes
    assert told in forward.notes

    train = amp_ir.jit(training_step(model, optimizer), model=model, optimizer=optimizer)
    assert train(X) > train(X) and told not in train.notes
    with torch.no_grad():
        evaluate = amp_ir.jit(lambda x: model(x).sum(), model=model, optimizer=optimizer)
        torch.testing.assert_close(evaluate(X), model(X).sum())
    assert told not in evaluate.notes
    compiled = torch.compile(model, backend="amp_ir")
    compiled(X).sum().backward()
    assert model.weight.grad is not None

    def differentiates(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = model(x).square().mean()
        return loss, *torch.autograd.grad(loss, [*model.parameters()])

    differentiated = amp_ir.jit(differentiates, model=model, optimizer=optimizer)
    differentiated(X)
    assert told not in differentiated.notes


def test_a_print_in_the_step_is_warned_of(caplog: pytest.LogCaptureFixture, capsys: Any) -> None:
    model, optimizer = parts()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        print(loss)
        f"{model.weight}"
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    train(X), train(X), train(X[:3])
    line = step.__code__.co_firstlineno + 2
    told = (
        f"The step turns a tensor into text, as print does, at step (forward), {__file__}:{line}; "
        f"step (forward), {__file__}:{line + 1}. That runs when the step is captured, not at each "
        "call, and shows no values: return the tensor and print it after the call."
    )
    levels = [one.levelno for one in caplog.records if one.getMessage() == told]
    assert levels[:1] == [logging.WARNING] and logging.WARNING not in levels[1:]
    assert told in train.notes
    assert "FakeTensor" in capsys.readouterr().out
    print(train(X))
    assert "FakeTensor" not in capsys.readouterr().out


def test_anomaly_detection_is_named() -> None:
    model, optimizer = parts()

    step = training_step(model, optimizer)

    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    with (
        pytest.warns(UserWarning),
        torch.autograd.set_detect_anomaly(True),
        pytest.raises(CaptureError) as refused,
    ):
        train(X)
    assert (
        "torch.autograd.set_detect_anomaly reads the values of every gradient. Leave it off around "
        "a compiled step; train.find_overflow(*batch) says which op and line makes a NaN, and so "
        'does jit(..., on_overflow="explain")'
    ) in str(refused.value)
    wrong = X.clone()
    wrong[0, 0] = float("nan")
    assert torch.isfinite(train(X))
    assert "A NaN in the batch" in str(train.find_overflow(wrong))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(9, 4), nn.LSTM(4, 4, batch_first=True)

    def forward(self, ids: torch.Tensor, lengths: Any) -> torch.Tensor:
        packed = pack_padded_sequence(
            self.table(ids), lengths, batch_first=True, enforce_sorted=False
        )
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]


IDS, LENGTHS = torch.arange(12).reshape(2, 6) % 9, torch.tensor([6, 4])


def test_lengths_as_a_list_are_passed_as_they_are() -> None:
    model = Tagger()
    refused = amp_ir.jit(
        lambda ids, n: model(ids, torch.asarray(n.tolist(), dtype=torch.int64)), model=model
    )
    with pytest.raises(CaptureError) as told:
        refused(IDS, LENGTHS)
    text = str(told.value)
    assert text.endswith(
        "RuntimeError: The tensor has a non-zero number of elements, but its data is not allocated "
        "yet. The values do not exist yet when a step is captured: make the list (.tolist()) "
        "before the call and pass it as an argument, or pass the tensor where one is taken too, as "
        "pack_padded_sequence takes the lengths"
    )
    wanted = model(IDS, LENGTHS)
    compiled = amp_ir.jit(model, model=model)
    torch.testing.assert_close(compiled(IDS, LENGTHS), wanted)
    torch.testing.assert_close(compiled(IDS, LENGTHS.tolist()), wanted)
    listed = amp_ir.jit(lambda ids, n: model(ids, n.tolist()), model=model)
    for lengths in (LENGTHS, LENGTHS.flip(0), torch.tensor([6, 1])):
        torch.testing.assert_close(listed(IDS, lengths), model(IDS, lengths))
    assert not listed.recompiles


def test_rows_are_packed_inside_of_the_step() -> None:
    model = Tagger()

    def step(packed: PackedSequence) -> torch.Tensor:
        rows = PackedSequence(model.table(packed.data), *packed[1:])
        return pad_packed_sequence(model.lstm(rows)[0], batch_first=True)[0]

    packed = pack_padded_sequence(IDS, LENGTHS, batch_first=True)
    with pytest.raises(CaptureError) as refused:
        amp_ir.jit(step, model=model)(packed)
    assert (
        "Where it is the batch sizes of a PackedSequence that the step is passed: pass the padded "
        "rows and their lengths, and call pack_padded_sequence inside of the step. "
    ) in str(refused.value)
    got = amp_ir.jit(model, model=model)(IDS, LENGTHS)
    torch.testing.assert_close(got, step(packed))


def test_what_a_counter_decides_is_an_argument() -> None:
    model, optimizer = parts()
    count = [0]

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def counts(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        count[0] += 1
        if count[0] % 4 == 0:
            update()
        return loss.detach()

    def told(x: torch.Tensor, updates: bool) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        if updates:
            update()
        return loss.detach()

    with pytest.raises(CaptureError, match=r"if count % 4 == 0\) is passed to the step as an arg"):
        amp_ir.jit(counts, model=model, optimizer=optimizer)(X)
    train = amp_ir.jit(told, model=model, optimizer=optimizer)
    losses = [train(X, (i + 1) % 4 == 0) for i in range(12)]
    assert losses[0] == losses[3] > losses[4] == losses[7] > losses[8]
    # A first batch adds to no gradient, the next two to one; the last updates.
    assert len(train.recompiles) == 2


def test_parameters_of_a_model_that_was_not_passed_are_one_place() -> None:
    model, optimizer = parts()
    average = torch.optim.swa_utils.AveragedModel(model)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        return loss.detach()

    with pytest.raises(CaptureError) as refused:
        amp_ir.jit(step, model=model, optimizer=optimizer)(X)
    lines = str(refused.value).splitlines()
    assert [line for line in lines if "requires a gradient" in line] == [
        line
        for line in lines
        if "uses what requires a gradient and is in none of the models: a tensor of shape (3, 4); "
        "a tensor of shape (3,). Pass its module in model=[...], or detach() the tensor" in line
    ]
    assert len(lines) == 3
    train = amp_ir.jit(step, model=[model, average], optimizer=optimizer)
    train(X)
    train(X)
    assert int(average.n_averaged) == 2


def test_a_metric_is_updated_after_the_step() -> None:
    classification = pytest.importorskip("torchmetrics.classification")
    model, optimizer = parts()
    accuracy = classification.MulticlassAccuracy(num_classes=3)
    classes = torch.tensor([0, 1, 2, 0, 1])

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = model(x)
        nn.functional.cross_entropy(scores, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        return scores.detach()

    def measures(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = step(x, y)
        accuracy(scores, y)
        return scores

    with pytest.raises(CaptureError) as refused:
        amp_ir.jit(measures, model=[model, accuracy], optimizer=optimizer)(X, classes)
    assert (
        "Update a metric of torchmetrics after the step, with what the step returns; in Lightning "
        "in on_train_batch_end"
    ) in str(refused.value)
    scores = amp_ir.jit(step, model=model, optimizer=optimizer)(X, classes)
    accuracy.update(scores, classes)
    assert 0 <= float(accuracy.compute()) <= 1
