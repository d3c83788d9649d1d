# SPDX-License-Identifier: Apache-2.0
"""`jit(..., buckets=, pad=)`: padded batches train as batches without padding do."""

from __future__ import annotations

import copy
import functools
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional

import amp_ir
from amp_ir.errors import (
    ArgumentError,
    CaptureError,
    IndexOutOfRangeError,
    OptionError,
    PaddingError,
)

WORDS, WIDTH = 20, 8
# Sums have another order.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


class Tagger(nn.Module):
    """Masked attention over a sequence, and scores for each of its words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(40, WIDTH)
        self.mix = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.scores = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        mixed, _ = self.mix(x, x, x, key_padding_mask=mask == 0, need_weights=False)
        return self.scores(self.norm(x + mixed))


def batch_of(length: int, rows: int = 3) -> tuple[torch.Tensor, ...]:
    ids = torch.randint(1, WORDS, (rows, length))
    return ids, torch.ones_like(ids), torch.randint(0, WORDS, (rows, length))


def tagger_step(model, optimizer):
    def step(ids, mask, labels):
        optimizer.zero_grad()
        scores = model(ids, mask)
        loss = functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach(), scores.detach()

    return step


BUCKETS = {name: {1: (8, 16)} for name in ("ids", "mask", "labels")}
PAD = {"ids": 0, "mask": 0, "labels": -100}


def training(seed: int = 0, **options):
    torch.manual_seed(seed)
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = tagger_step(model, optimizer)
    if not options:
        return model, step
    return model, amp_ir.jit(step, model=model, optimizer=optimizer, **options)


def test_padded_batches_train_as_in_pytorch_without_padding():
    model, step = training()
    own, train = training(buckets=BUCKETS, pad=PAD)
    for length in (5, 16, 8, 3, 11, 7, 15):
        batch = batch_of(length)
        loss, scores = step(*batch)
        own_loss, own_scores = train(*batch)
        assert own_scores.shape == scores.shape
        torch.testing.assert_close(own_loss, loss, **TOLERANCE)
        torch.testing.assert_close(own_scores, scores, **TOLERANCE)
    assert len(train.recompiles) == 1  # two buckets
    for one, other in zip(own.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_padding_changes_nothing_in_low_precision(dtype):
    """The program of one size runs both batches, so that only the padding differs."""
    own, train = training(buckets=BUCKETS, pad=PAD, amp_dtype=dtype)
    other, again = training(buckets=BUCKETS, pad=PAD, amp_dtype=dtype)
    for length in (11, 16, 13):
        ids, mask, labels = batch_of(length)
        loss, scores = train(ids, mask, labels)
        wide = [
            functional.pad(one, (0, 16 - length), value=number)
            for one, number in ((ids, 0), (mask, 0), (labels, -100))
        ]
        same_loss, wide_scores = again(*wide)
        assert torch.equal(loss, same_loss)
        assert torch.equal(scores, wide_scores[:, :length])
    for one, same in zip(own.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, same)


def test_a_loss_scaler_sees_no_padding():
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = amp_ir.GradScaler(init_scale=2.0**10)

    def step(ids, mask, labels):
        optimizer.zero_grad()
        scores = model(ids, mask).flatten(0, 1)
        scaler.scale(functional.cross_entropy(scores, labels.flatten())).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return norm

    start = copy.deepcopy(model.state_dict())
    options = {"model": model, "optimizer": optimizer, "scaler": scaler, "amp_dtype": "float16"}
    batches = [batch_of(length) for length in (5, 8, 3)]
    unpadded = amp_ir.jit(step, **options)
    expected = [unpadded(*batch) for batch in batches]
    model.load_state_dict(start)
    train = amp_ir.jit(step, **options, buckets=BUCKETS, pad=PAD)
    for batch, norm in zip(batches, expected, strict=True):
        # Gradients of weights are float16 sums of another order.
        torch.testing.assert_close(train(*batch), norm, rtol=5e-3, atol=0)
    assert not train.skipped


def test_a_batch_longer_than_all_buckets_runs_unpadded(caplog):
    _, step = training()
    _, train = training(buckets=BUCKETS, pad=PAD)
    batches = [batch_of(17), batch_of(17), batch_of(4)]
    with caplog.at_level(logging.WARNING, "amp_ir"):
        for batch in batches:
            torch.testing.assert_close(train(*batch)[0], step(*batch)[0], **TOLERANCE)
    assert [one.message for one in caplog.records] == [
        "axis 1 of ids has 17 entries, and its largest bucket has 16. Such a batch runs unpadded; "
        "add a larger size to buckets=. It has a program of its own. Said once"
    ]


def first_entries(model, optimizer):
    def step(x, mask):
        optimizer.zero_grad()
        pooled = (x * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        loss = (model(pooled) + model(x[:, 3])).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def test_a_batch_too_short_for_what_the_step_reads_runs_unpadded():
    """`x[:, 3]` of three entries is an error in PyTorch, and must not be a number here."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = first_entries(model, optimizer)
    sizes = {"x": {1: (8,)}, "mask": {1: (8,)}}
    train = amp_ir.jit(
        step, model=model, optimizer=optimizer, buckets=sizes, pad={"x": 7.0, "mask": 0}
    )
    for length in (5, 4):
        batch = torch.randn(2, length, 4), torch.ones(2, length)
        start = copy.deepcopy(model.state_dict())
        expected = step(*batch)
        model.load_state_dict(start)
        torch.testing.assert_close(train(*batch), expected, **TOLERANCE)
    with pytest.raises(CaptureError, match="index 3 is out of bounds|out of range"):
        train(torch.randn(2, 3, 4), torch.ones(2, 3))


def mean_step(model, optimizer):
    def step(ids, mask):
        optimizer.zero_grad()
        pooled = model.words(ids).mean(1)
        loss = model.scores(pooled).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def test_a_leak_is_refused_with_its_line_and_nothing_changes():
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mean_step(model, optimizer)
    sizes = {"ids": {1: (8, 16)}}
    train = amp_ir.jit(step, model=model, optimizer=optimizer, buckets=sizes, pad={"ids": 0})
    before = copy.deepcopy(model.state_dict())
    line = mean_step.__code__.co_firstlineno + 3
    expected = (
        "padding may change what the step computes:\n"
        f"  step (forward), {__file__}:{line}: relax.mean: elements are averaged over axis 1 of "
        "ids, padding included\n"
        "Mask the padding there (masked attention, ignored labels, sums of masked values over the "
        "mask's sum), or call the step without buckets="
    )
    for length in (5, 8):
        with pytest.raises(PaddingError) as raised:
            train(torch.ones(2, length, dtype=torch.long), torch.ones(2, 3))
        assert str(raised.value) == expected
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert all(one.grad is None for one in model.parameters())


def test_lengths_that_are_equal_once_and_differ_later():
    """Two sequences of one length are one dimension, which they are not at the next call."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def masked_mean(x, mask):
        return (model(x) * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)

    def step(source, source_mask, target, target_mask):
        optimizer.zero_grad()
        distance = masked_mean(source, source_mask) - masked_mean(target, target_mask)
        loss = distance.square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    names = ("source", "source_mask", "target", "target_mask")
    train = amp_ir.jit(
        step,
        model=model,
        optimizer=optimizer,
        buckets={name: {1: (4, 8)} for name in names},
        pad=dict.fromkeys(names, 0),
    )
    for source, target in ((5, 5), (5, 7), (3, 3), (3, 6)):
        one, other = torch.randn(2, source, 3), torch.randn(2, target, 3)
        batch = one, torch.ones(2, source), other, torch.ones(2, target)
        start = copy.deepcopy(model.state_dict())
        expected = step(*batch)
        model.load_state_dict(start)
        torch.testing.assert_close(train(*batch), expected, **TOLERANCE)


def test_sequences_that_must_have_one_length_are_refused_where_they_have_two():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, mask):
        (model(x) * mask.unsqueeze(-1)).sum().backward()
        optimizer.step()

    sizes = {"x": {1: (8,)}, "mask": {1: (8,)}}
    train = amp_ir.jit(
        step, model=model, optimizer=optimizer, buckets=sizes, pad={"x": 0, "mask": 0}
    )
    with pytest.raises(PaddingError) as raised:
        train(torch.randn(2, 5, 3), torch.ones(2, 6))
    assert str(raised.value).startswith(
        "the step cannot be captured with other lengths (5 for axis 1 of x, 3 for axis 1 of mask), "
        "so that nothing can be proven of its padding: the step failed while it was traced, at "
        "step (forward)"
    )
    assert str(raised.value).endswith(
        ". Tensors that are used together need one length in each call, which is here 5 for axis 1 "
        "of x, 6 for axis 1 of mask"
    )


def test_a_dict_of_tensors_and_the_batch_axis():
    """The last batch of an epoch is smaller: its rows are padded, with labels that are ignored."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(batch, factor):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(batch["x"]), batch["y"]) * factor
        loss.backward()
        optimizer.step()
        return {"loss": loss.detach(), "scale": factor}

    own = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    train = amp_ir.jit(
        step,
        model=model,
        optimizer=optimizer,
        buckets={"x": {0: (16,)}, "y": {-1: (16,)}},
        pad={"x": 0.0, "y": -100},
    )
    batches = [
        ({"x": torch.randn(rows, 4), "y": torch.randint(0, 3, (rows,))}, 0.5)
        for rows in (16, 16, 9)
    ]
    found = [train(*batch) for batch in batches]
    assert not train.recompiles
    model.load_state_dict(own[0].state_dict())
    optimizer.load_state_dict(own[1])
    for batch, got in zip(batches, found, strict=True):
        torch.testing.assert_close(got, step(*batch), **TOLERANCE)


def test_training_and_evaluation_are_proven_one_by_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    sizes, pad = {"x": {0: (8,)}, "y": {0: (8,)}}, {"x": 0, "y": -100}
    train = amp_ir.jit(step, model=model, optimizer=optimizer, buckets=sizes, pad=pad)
    batch = torch.randn(5, 4), torch.randint(0, 2, (5,))
    model.eval()
    start = copy.deepcopy(model.state_dict())
    expected = step(*batch)
    model.load_state_dict(start)
    torch.testing.assert_close(train(*batch), expected, **TOLERANCE)
    model.train()
    with pytest.raises(PaddingError, match=r"0 \(forward\).*batch_norm"):
        train(*batch)


def test_a_number_for_padding_that_is_no_index_is_an_error_with_its_place():
    _, train = training(buckets=BUCKETS, pad={**PAD, "ids": -1})
    with pytest.raises(IndexOutOfRangeError, match="words"):
        train(*batch_of(5))
    train(*batch_of(8))


def test_wrong_options_are_listed_at_once():
    with pytest.raises(OptionError) as raised:
        training(
            buckets={"ids": {1: (8, 1)}, "mask": (8, 16), 2: {"1": (8,)}, "labels": {1: 8}},
            pad={"ids": 0, "other": 1, "mask": "0", "labels": -100},
        )
    assert str(raised.value) == (
        "buckets['ids'][1] is (8, 1), expected one or more sizes of at least 2, or \"auto\"; "
        "buckets['mask'] is (8, 16), expected sizes by axis, as "
        '{"input_ids": {1: (64, 128, 256)}}; '
        "buckets[2] has the axis '1', expected a number; "
        "pad= has no number for 2, which buckets= pads; "
        "buckets['labels'][1] is 8, expected one or more sizes of at least 2, or \"auto\"; "
        "pad= has a number for 'other', which buckets= does not pad; "
        "pad['mask'] is '0', expected a number"
    )
    for options in ({"pad": {"ids": 0}}, {"pad_check": "values"}):
        (name,) = options
        with pytest.raises(OptionError) as raised:
            training(**options)
        assert str(raised.value) == (
            f"{name}= is given without buckets=, which says what is padded to which sizes"
        )


def test_names_that_the_batch_lacks_are_listed_at_once():
    sizes = {"words": {1: (8,)}, "mask": {2: (8,)}}
    _, train = training(buckets=sizes, pad=dict.fromkeys(sizes, 0))
    with pytest.raises(ArgumentError) as raised:
        train(*batch_of(5))
    assert str(raised.value) == (
        "buckets= names 'words', which is no argument of this call; it has 'ids', 'mask', "
        "'labels'; buckets= pads axis 2 of 'mask', which has 2 axes"
    )


def test_a_name_of_several_tensors_or_of_a_list_is_an_error():
    def in_place_of(ids, **options):
        _, train = training(pad={"ids": 0}, **options)
        with pytest.raises(ArgumentError) as raised:
            train(ids, *batch_of(5)[1:])
        return str(raised.value)

    sizes = {"ids": {1: (8,)}}
    assert in_place_of(batch_of(5)[0].tolist(), buckets=sizes) == (
        f"buckets= names 'ids', which is no tensor but a container of {batch_of(5)[0].numel()} "
        "values; pass a tensor, or name those of them that are tensors"
    )
    pair = [{"ids": batch_of(5)[0]}, {"ids": batch_of(5)[0]}]
    assert in_place_of(pair, buckets=sizes) == (
        "buckets= names 'ids', which is 2 arguments of this call; name one as "
        "\"0[0]['ids']\", \"0[1]['ids']\""
    )
    many = {f"field{k}": torch.zeros(2, 5) for k in range(20)}
    text = in_place_of(many, buckets="auto")
    assert text.startswith("pad= names 'ids', which is no tensor but a container of 20 values")


@pytest.mark.parametrize(
    ("number", "dtype"),
    [
        (float("inf"), torch.int64),
        (2**63, torch.int64),
        (256, torch.uint8),
        (70000.0, torch.float16),
        (1e39, torch.float32),
    ],
)
def test_a_number_for_padding_that_the_tensor_cannot_hold_is_an_error(number, dtype):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"buckets": {0: {0: (8,)}}, "pad": {0: number}}
    train = amp_ir.jit(model, model=model, optimizer=optimizer, **options)
    with pytest.raises(ArgumentError) as raised:
        train(torch.zeros(3, 2, dtype=dtype))
    assert str(raised.value) == f"pad= has {number!r} for 0, which {dtype} cannot hold"


def recurrent_training(reads_last: bool = False):
    torch.manual_seed(0)
    recurrence = nn.RNN(3, 4, nonlinearity="relu", batch_first=True)
    model = nn.Linear(4, 2)
    parameters = [*recurrence.parameters(), *model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def step(x, mask, labels):
        optimizer.zero_grad()
        states, last = recurrence(x)
        pooled = (states * mask.unsqueeze(-1)).sum(1)
        loss = functional.cross_entropy(model(last[0] if reads_last else pooled), labels)
        loss.backward()
        optimizer.step()
        return loss.detach(), states.detach()

    options = {"model": [recurrence, model], "optimizer": optimizer}
    sizes = {"x": {1: (8,)}, "mask": {1: (8,)}}
    return step, functools.partial(
        amp_ir.jit, step, **options, buckets=sizes, pad={"x": 1.0, "mask": 0}
    )


def test_what_cannot_be_proven_may_be_compared_by_its_numbers():
    step, jit = recurrent_training()
    _, same_jit = recurrent_training()
    batches = [(torch.randn(2, n, 3), torch.ones(2, n), torch.tensor([0, 1])) for n in (8, 5, 3)]
    with pytest.raises(PaddingError, match="amp_ir.rnn_relu: states may grow without bound"):
        jit()(*batches[0])
    train = same_jit(pad_check="values")
    for batch in batches:
        loss, states = step(*batch)
        got, own_states = train(*batch)
        torch.testing.assert_close(got, loss, **TOLERANCE)
        torch.testing.assert_close(own_states, states, **TOLERANCE)


def test_numbers_that_padding_changes_are_refused():
    _, jit = recurrent_training(reads_last=True)
    train = jit(pad_check="values")
    with pytest.raises(PaddingError, match="by the numbers of this batch") as raised:
        train(torch.randn(2, 5, 3), torch.ones(2, 5), torch.tensor([0, 1]))
    assert "result0 differs by" in str(raised.value)


def two_sequences(leaks=False, **options):
    """Return a step that returns two sequences, compiled and not."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(source, target):
        optimizer.zero_grad()
        one, other = model(source), model(target)
        loss = one[:, 0].square().sum() + (other[:, :, 0].mean() if leaks else other[:, 0].sum())
        loss.backward()
        optimizer.step()
        return loss.detach(), one.detach(), other.detach()

    buckets, pad = {0: {1: (8,)}, 1: {1: (16,)}}, {0: 0.5, 1: 0.5}
    train = amp_ir.jit(step, model=model, optimizer=optimizer, buckets=buckets, pad=pad, **options)
    return model, step, train


@pytest.mark.parametrize("first", [(5, 13), (5, 16)])
def test_compared_results_are_as_long_as_each_later_batch(first):
    """With as much padding on two dimensions, or with none on one, sizes alone are ambiguous."""
    model, step, train = two_sequences(pad_check="values")
    for source, target in (first, (6, 11), (4, 14)):
        batch = torch.randn(2, source, 3), torch.randn(2, target, 3)
        start = copy.deepcopy(model.state_dict())
        expected = step(*batch)
        model.load_state_dict(start)
        torch.testing.assert_close(train(*batch), expected, **TOLERANCE)


def test_numbers_are_compared_again_when_another_dimension_is_padded():
    _, _, train = two_sequences(leaks=True, pad_check="values")
    train(torch.randn(2, 5, 3), torch.randn(2, 16, 3))
    with pytest.raises(PaddingError, match="by the numbers of this batch"):
        train(torch.randn(2, 5, 3), torch.randn(2, 11, 3))


def branching_training(longest):
    """Return a step that reads entry 3, and multiplies where the sequence is short."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        y = model(x[:, 3]) * (5.0 if x.shape[1] <= longest else 1.0)
        loss = y.square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    options = {"buckets": {0: {1: (16,)}}, "pad": {0: 0}}
    return model, step, amp_ir.jit(step, model=model, optimizer=optimizer, **options)


def test_a_branch_on_a_length_is_seen_where_the_shortest_cannot_be_captured():
    _, _, train = branching_training(longest=8)
    with pytest.raises(PaddingError, match="depends on the padded length"):
        train(torch.randn(2, 10, 3))


@pytest.mark.parametrize("divisor", [3, 4, 5, 6])
def test_a_remainder_of_the_length_is_seen(divisor):
    """12 and 9 have the same remainder by 3; the proof takes another length."""
    model = nn.Linear(3, 3)

    def step(x):
        return model(x[:, 0]) * (x.shape[1] % divisor)

    train = amp_ir.jit(step, model=model, buckets={0: {1: (8, 12)}}, pad={0: 0})
    with pytest.raises(PaddingError, match="depends on the padded length"):
        train(torch.randn(2, 10, 3))


def test_a_branch_on_lengths_that_a_size_is_not_chosen_for_is_none():
    """Lengths near those of the size are tried first, then those of the size alone."""
    model = nn.Linear(3, 3)

    def step(x):
        return model(x[:, 0]) * (2.0 if x.shape[1] <= 8 else 1.0)

    train = amp_ir.jit(step, model=model, buckets={0: {1: (8, 16)}}, pad={0: 0})
    for length in (10, 5):
        x = torch.randn(2, length, 3)
        torch.testing.assert_close(train(x), step(x), **TOLERANCE)
    assert len(train.recompiles) == 1  # two buckets


def test_lengths_shorter_than_those_proven_run_unpadded():
    """With 2 and 3 entries the step cannot be captured; 5 is the first length of other parity."""
    model, step, train = branching_training(longest=4)
    for length in (10, 5, 4):
        x, start = torch.randn(2, length, 3), copy.deepcopy(model.state_dict())
        expected = step(x)
        model.load_state_dict(start)
        torch.testing.assert_close(train(x), expected, **TOLERANCE)


def test_dropout_does_not_disturb_the_comparison():
    torch.manual_seed(0)
    mix = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
    optimizer = torch.optim.SGD(mix.parameters(), lr=0.1)

    def step(x, mask):
        optimizer.zero_grad()
        mixed, _ = mix(x, x, x, key_padding_mask=mask == 0, need_weights=False)
        loss = (functional.dropout(mixed, 0.5) * mask.unsqueeze(-1)).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    train = amp_ir.jit(
        step,
        model=mix,
        optimizer=optimizer,
        buckets={"x": {1: (8,)}, "mask": {1: (8,)}},
        pad={"x": 1.0, "mask": 0},
        pad_check="values",
    )
    assert train(torch.randn(2, 5, 8), torch.ones(2, 5)).isfinite()


def test_announced_batches_are_padded_too():
    _, step = training()
    _, train = training(buckets=BUCKETS, pad=PAD, precompile=[batch_of(12)])
    batches = [batch_of(length) for length in (5, 6, 7, 13)]
    for batch in batches:
        torch.testing.assert_close(train(*batch)[0], step(*batch)[0], **TOLERANCE)
    assert [one.in_background for one in train.recompiles] == [True]


def test_sizes_can_be_chosen_as_lengths_come():
    _, step = training()
    sizes = {name: {1: "auto"} for name in ("ids", "mask", "labels")}
    _, train = training(buckets=sizes, pad=PAD)
    for length in (5, 17, 9, 3, 31, 16):
        batch = batch_of(length)
        torch.testing.assert_close(train(*batch)[0], step(*batch)[0], **TOLERANCE)
    assert len(train.recompiles) == 1  # 16 and 32


def test_an_axis_named_from_both_ends_is_an_error():
    sizes = {"ids": {1: (8,), -1: (16,)}}
    _, train = training(buckets=sizes, pad={"ids": 0})
    with pytest.raises(ArgumentError, match="pads an axis of 'ids' twice, counted from both ends"):
        train(*batch_of(5))


def test_the_largest_bucket_may_be_as_long_as_a_table():
    """Where all of a table is read, the capture has no slice of it."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    model.register_buffer("table", torch.randn(1, 16, 3))
    model.register_buffer("places", torch.arange(16)[None])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, mask):
        optimizer.zero_grad()
        n = x.shape[1]
        table, places = model.table[:, :n], model.places[:, :n, None]
        y = torch.cat([(model(x) + table) * mask, places * mask], -1)
        loss = y.square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    train = amp_ir.jit(
        step, model=model, optimizer=optimizer, buckets={"x": {1: (8, 16)}, "mask": {1: (8, 16)}},
        pad={"x": 1.0, "mask": 0},
    )  # fmt: skip
    for length in (16, 11, 5):
        batch = torch.randn(2, length, 3), torch.ones(2, length, 1)
        start = copy.deepcopy(model.state_dict())
        expected = step(*batch)
        model.load_state_dict(start)
        torch.testing.assert_close(train(*batch), expected, **TOLERANCE)
