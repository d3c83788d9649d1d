# SPDX-License-Identifier: Apache-2.0
"""pack_padded_sequence and pad_packed_sequence around recurrent layers; lengths are data."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import amp_ir
from amp_ir.api import lower
from amp_ir.capture.trace import capture_step
from amp_ir.errors import AmpIrError, CaptureError, SequenceLengthError
from compiled_steps import assert_compiled_alike
from step_comparison import Training, assert_trains_alike

KINDS: dict[str, Any] = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "RNN_tanh": nn.RNN,
    "RNN_relu": functools.partial(nn.RNN, nonlinearity="relu"),
}
ROWS, STEPS, INNER, HIDDEN = 4, 7, 5, 6
# Options of the layer, of packing, of padding; whether a state is given.
PROGRAMS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], bool]] = {
    "one layer": ({}, {"enforce_sorted": False}, {}, False),
    "sorted, both ways": ({"bidirectional": True}, {}, {"padding_value": 0.5}, True),
    "batch first, deep": (
        {"num_layers": 2, "bidirectional": True, "batch_first": True},
        {"batch_first": True, "enforce_sorted": False},
        {"batch_first": True, "total_length": STEPS + 2, "padding_value": -1.0},
        True,
    ),
}


class Model(nn.Module):
    def __init__(self, kind: str, program: str, **more: Any) -> None:
        super().__init__()
        options, self.packing, self.padding, is_given = PROGRAMS[program]
        self.layer = KINDS[kind](INNER, HIDDEN, **options, **more)
        directions = 1 + bool(options.get("bidirectional"))
        self.head = nn.Linear(directions * (more.get("proj_size") or HIDDEN), 3)
        shape = options.get("num_layers", 1) * directions, 1, HIDDEN
        names = ("hidden", "cell") if kind == "LSTM" else ("hidden",)
        self.initial = nn.ParameterDict(
            {name: torch.linspace(-1, 1, math.prod(shape)).reshape(shape) for name in names}
            if is_given
            else {}
        )

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
        packed = pack_padded_sequence(x, lengths, **self.packing)
        state = tuple(one.expand(-1, len(lengths), -1) for one in self.initial.values())
        given = (state if len(state) > 1 else state[0],) if state else ()
        output, last = self.layer(packed, *given)
        y, found = pad_packed_sequence(output, **self.padding)
        last = last if isinstance(last, tuple) else (last,)
        return self.head(y), torch.cat([one.flatten() for one in last]), found


def training(
    kind: str, program: str = "one layer", dtype: torch.dtype = torch.float32, **more: Any
) -> Training:
    model = Model(kind, program, **more).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, lengths: torch.Tensor) -> Any:
        optimizer.zero_grad()
        y, last, found = model(x.to(dtype), lengths)
        weights = torch.linspace(-1, 1.3, 3), torch.linspace(-1, 1.7, last.numel())
        loss = (y * weights[0].to(dtype)).square().mean()
        loss = loss + (last * weights[1].to(dtype)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach(), y.detach(), last.detach(), found

    return Training(model, optimizer, step)


def batch(program: str, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of other lengths each time, NaN past the end; one is as long as the padding."""
    _, packing, _, _ = PROGRAMS[program]
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(ROWS, STEPS, INNER, generator=generator)
    lengths = torch.randint(1, STEPS + 1, (ROWS,), generator=generator)
    lengths[index % ROWS] = STEPS
    if packing.get("enforce_sorted", True):
        lengths = lengths.sort(descending=True).values
    for row, length in enumerate(lengths.tolist()):
        x[row, length:] = math.nan
    return x if packing.get("batch_first") else x.transpose(0, 1).contiguous(), lengths


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_trains_as_in_eager_whatever_the_lengths(kind: str, program: str) -> None:
    build = functools.partial(training, kind, program, torch.float64)
    # The learning rate is a float32 input.
    options = {"steps": 4, "rtol": 1e-6, "atol": 1e-7}
    assert assert_trains_alike(build, functools.partial(batch, program), **options) == 1


# All pairs are compared above, captured: here each program has the kind with two states, and one
# with one.
@pytest.mark.parametrize(
    ("kind", "program"),
    [
        *(("LSTM", program) for program in PROGRAMS),
        *zip(("GRU", "RNN_tanh", "RNN_relu"), PROGRAMS, strict=True),
    ],
)
def test_a_compiled_step_trains_as_in_eager_whatever_the_lengths(kind: str, program: str) -> None:
    build = functools.partial(training, kind, program)
    assert assert_compiled_alike(build, functools.partial(batch, program), steps=4) == 1


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
def test_a_projected_lstm_is_pytorchs() -> None:
    build = functools.partial(training, "LSTM", "one layer", torch.float64, proj_size=4)
    batches = functools.partial(batch, "one layer")
    assert assert_trains_alike(build, batches, rtol=1e-6, atol=1e-7) == 1


@pytest.mark.parametrize("amp_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_trains_as_float64(kind: str, amp_dtype: str) -> None:
    torch.manual_seed(0)
    exact = training(kind, dtype=torch.float64)
    batches = [batch("one layer", index) for index in range(4)]
    expected = [float(exact.step(*one)[0]) for one in batches]
    torch.manual_seed(0)
    low = training(kind)
    options = {"model": low.model, "optimizer": low.optimizer, "amp_dtype": amp_dtype}
    step = amp_ir.jit(low.step, **options)
    found = [float(step(*one)[0]) for one in batches]
    # Each step rounds states and gates to 2^-9 (bfloat16) or 2^-12.
    bits = 6 if amp_dtype == "bfloat16" else 9
    assert found == pytest.approx(expected, rel=2**-bits, abs=2.0 ** -(bits + 3) * expected[0])
    assert not step.recompiles


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_scale_passes_through(kind: str) -> None:
    """float16 with a scale that overflows at first: a step is skipped, and then they train."""
    torch.manual_seed(0)
    model = Model(kind, "sorted, both ways")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)

    def step(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        y, last, _ = model(x, lengths)
        loss = y.square().mean() + last.square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    train = amp_ir.jit(step, model=model, optimizer=optimizer, scaler=scaler, amp_dtype="float16")
    given = batch("sorted, both ways", 0)
    losses = [float(train(*given)) for _ in range(24)]
    assert losses[0] == losses[1]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_one_call_and_nothing_is_checked_in_the_step(kind: str) -> None:
    trained = training(kind, "batch first, deep")
    mod, _ = amp_ir.trace_step(
        trained.step,
        batch("batch first, deep", 0),
        model=trained.model,
        optimizer=trained.optimizer,
    )
    planned = lower(mod)
    name = f"onednn.{kind.lower()}"
    calls = [one.name for one in planned.plan.calls]
    assert calls.count(name) == calls.count(f"{name}_backward") == 4
    # Only what the host computes from the lengths before a step.
    assert len(planned.checks.on_host) == 1
    assert not planned.checks.in_step


def test_dropout_between_layers_is_drawn_anew_and_repeats() -> None:
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        trained = training("GRU", "batch first, deep", dropout=0.5)
        for group in trained.optimizer.param_groups:
            group["lr"] = 0.0
        step = amp_ir.jit(trained.step, model=trained.model, optimizer=trained.optimizer)
        given = batch("batch first, deep", 0)
        losses.append([float(step(*given)[0]) for _ in range(3)])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3


@pytest.mark.parametrize("total", [None, 7, 9])
@pytest.mark.parametrize("batch_first", [False, True])
def test_packing_and_padding_alone_give_what_was_packed(batch_first: bool, total: Any) -> None:
    """Of numbers of any dtype and any shape; lengths of int32."""

    def step(x: torch.Tensor, ids: torch.Tensor, lengths: torch.Tensor) -> Any:
        found = []
        for one in (x, ids):
            packed = rnn.pack_padded_sequence(one, lengths, batch_first, enforce_sorted=False)
            found += rnn.pad_packed_sequence(packed, batch_first, 3.0, total)
        return found

    train = amp_ir.jit(step, model=nn.Identity())
    for index in range(2):
        x, lengths = batch("one layer", index)
        x = x.unsqueeze(-1).expand(-1, -1, -1, 2)
        ids = torch.arange(ROWS * STEPS).reshape(STEPS, ROWS)
        x, ids = (one.transpose(0, 1) if batch_first else one for one in (x, ids))
        given = x.contiguous(), ids.contiguous(), lengths.int()
        torch.testing.assert_close(train(*given), step(*given), rtol=0, atol=0)
    assert not train.recompiles


def test_a_shorter_total_length_drops_steps_that_no_sequence_has() -> None:
    def step(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        return pad_packed_sequence(packed, total_length=5)[0]

    train = amp_ir.jit(step, model=nn.Identity())
    x = torch.randn(STEPS, 3, 2)
    for lengths in (torch.tensor([5, 2, 3]), torch.tensor([1, 4, 2])):
        assert torch.equal(train(x, lengths), step(x, lengths))
    with pytest.raises(SequenceLengthError, match="up to its total_length, 5; got 6, in "):
        train(x, torch.tensor([5, 6, 3]))


def test_lengths_that_the_step_computes_are_data_too() -> None:
    """From a mask, as a tokenizer gives it."""
    torch.manual_seed(0)
    model = nn.GRU(3, 4, batch_first=True)

    def step(x: torch.Tensor, mask: torch.Tensor) -> Any:
        packed = pack_padded_sequence(x, mask.sum(1).cpu(), True, False)
        return pad_packed_sequence(model(packed)[0], True, total_length=x.shape[1])[0]

    train = amp_ir.jit(step, model=model)
    for lengths in ([4, 2, 3], [1, 5, 2]):
        mask = torch.arange(5) < torch.tensor(lengths).unsqueeze(1)
        x = torch.randn(3, 5, 3)
        torch.testing.assert_close(train(x, mask), step(x, mask), rtol=1e-5, atol=1e-6)
    assert not train.recompiles


def test_a_list_of_lengths_is_compiled_for() -> None:
    model = nn.RNN(3, 4)
    x = torch.randn(5, 2, 3)

    def step(x: torch.Tensor) -> Any:
        return pad_packed_sequence(model(pack_padded_sequence(x, [5, 2]))[0])[0]

    torch.testing.assert_close(amp_ir.jit(step, model=model)(x), step(x), rtol=1e-5, atol=1e-6)


WRONG: dict[str, tuple[list[int], dict[str, Any], str]] = {
    "too long": (
        [8, 3], {}, "pack_padded_sequence takes lengths from 1 to 7, the steps of its input; got 8",
    ),
    "empty": (
        [7, 0], {}, "pack_padded_sequence takes lengths from 1 to 7, the steps of its input; got 0",
    ),
    "not sorted": (
        [5, 7], {"enforce_sorted": True},
        "pack_padded_sequence takes lengths in decreasing order, or enforce_sorted=False: a length "
        "less the next one must be 0 or more; got -2",
    ),
    "none as long as the padding": (
        [3, 5], {},
        "pad_packed_sequence makes as many steps as the longest sequence has, and a compiled step "
        "has fixed shapes: pass total_length=7, or lengths of which the largest is 7; got 5",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_lengths_that_do_not_fit_are_refused_before_anything_runs(case: str) -> None:
    wrong, options, expected = WRONG[case]
    model = nn.GRU(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        packed = pack_padded_sequence(x, lengths, **{"enforce_sorted": False, **options})
        loss = pad_packed_sequence(model(packed)[0])[0].square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    train = amp_ir.jit(step, model=model, optimizer=optimizer)
    x = torch.randn(7, 2, 3)
    train(x, torch.tensor([7, 4]))
    before = [one.detach().clone() for one in model.parameters()]
    with pytest.raises(SequenceLengthError) as caught:
        train(x, torch.tensor(wrong))
    where = f"in step (forward), {__file__}:"
    assert str(caught.value).startswith(f"{expected}, {where}")
    assert str(caught.value).endswith(". Nothing was run and nothing has changed")
    for one, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(one, old)
    train(x, torch.tensor([7, 1]))


def test_the_error_is_a_runtime_error_as_in_pytorch() -> None:
    assert issubclass(SequenceLengthError, AmpIrError)
    assert issubclass(SequenceLengthError, RuntimeError)
    assert issubclass(SequenceLengthError, ValueError)


USES: dict[str, tuple[Any, str, str]] = {
    "data": (lambda packed: packed.data * 2, "mul", "data"),
    "a function of data": (lambda packed: torch.relu(packed.data), "relu", "data"),
    "a list with data": (lambda packed: torch.cat([packed.data, packed.data]), "cat", "data"),
    "the shape": (lambda packed: packed.data.shape, "__get__", "data"),
    "batch_sizes": (lambda packed: packed.batch_sizes + 1, "add", "batch_sizes"),
    "their number": (lambda packed: len(packed.batch_sizes), "__len__", "batch_sizes"),
    "the order": (lambda packed: packed.sorted_indices.sum(), "sum", "sorted_indices"),
    "a copy": (lambda packed: packed.double(), "to", "data"),
}


@pytest.mark.parametrize("use", USES)
def test_what_depends_on_the_lengths_is_refused(use: str) -> None:
    read, function, part = USES[use]
    model = nn.LSTM(3, 4)

    def step(x: torch.Tensor, lengths: torch.Tensor) -> Any:
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        return read(model(packed)[0])

    with pytest.raises(CaptureError) as caught:
        capture_step(step, (torch.randn(7, 2, 3), torch.tensor([7, 3])), model=model)
    text = str(caught.value)
    assert (
        f"{function} reads {part} of a PackedSequence, whose elements and shape depend on the "
        "lengths" in text
    )
    assert (
        "Give it to recurrent layers and pad_packed_sequence alone; compute on what that returns, "
        "with total_length= and a mask of the lengths" in text
    )


def test_lengths_of_another_number_of_sequences_are_refused_at_the_capture() -> None:
    def step(x: torch.Tensor, lengths: torch.Tensor) -> Any:
        return pad_packed_sequence(pack_padded_sequence(x, lengths))[0]

    with pytest.raises(CaptureError) as caught:
        capture_step(step, (torch.randn(7, 2, 3), torch.tensor([7, 3, 2])), model=nn.Identity())
    assert (
        "RuntimeError: 'lengths' argument should be a 1D CPU int64 tensor with one number for each "
        "of 2 sequences, but got shape (3,) on cpu" in str(caught.value)
    )


def test_pytorch_is_as_before_after_a_capture_that_failed() -> None:
    before = dict(vars(rnn))
    test_what_depends_on_the_lengths_is_refused("data")
    assert dict(vars(rnn)) == before
    packed = pack_padded_sequence(torch.ones(3, 2), torch.tensor([1, 3]), enforce_sorted=False)
    assert packed.data.shape == (4,)
