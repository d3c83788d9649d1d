# SPDX-License-Identifier: Apache-2.0
"""Loops over LSTM, GRU and RNN cells as users write them, and how many layers they become."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from step_comparison import Training, normal

KINDS: dict[str, Any] = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "rnn_tanh": nn.RNNCell,
    "rnn_relu": functools.partial(nn.RNNCell, nonlinearity="relu"),
}
ROWS, OF_INPUT, WIDTH = 3, 5, 6
State = Any


def hidden_of(state: State) -> torch.Tensor:
    return state[0] if isinstance(state, tuple) else state


def changed(state: State, function: Callable[[torch.Tensor], torch.Tensor]) -> State:
    """The state with another hidden state, and the same cell state."""
    return (function(state[0]), *state[1:]) if isinstance(state, tuple) else function(state)


class Looped(nn.Module):
    """Two cells, a layer before and a head behind; `loop` is how they are called."""

    def __init__(self, kind: str, loop: Callable[..., torch.Tensor], **options: Any) -> None:
        super().__init__()
        self.before = nn.Linear(OF_INPUT, OF_INPUT)
        self.cell = KINDS[kind](OF_INPUT, WIDTH, **options)
        self.second = KINDS[kind](WIDTH, WIDTH, **options)
        self.head = nn.Linear(WIDTH, 2)
        self.initial = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.loop = loop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loop(self, x)

    def given(self) -> State:
        """A trained initial state."""
        state = self.initial.expand(ROWS, WIDTH)
        return (state, state * 0.5) if isinstance(self.cell, nn.LSTMCell) else state


def stacked(m: Looped, x: torch.Tensor) -> torch.Tensor:
    """The loop of a tutorial: time first, all states stacked."""
    state, outputs = None, []
    for one in x.transpose(0, 1):
        state = m.cell(one, state)
        outputs.append(hidden_of(state))
    return m.head(torch.stack(outputs))


def indexed(m: Looped, x: torch.Tensor) -> torch.Tensor:
    """Batch first, an input that needs a gradient, a trained initial state."""
    x, state, outputs = m.before(x), m.given(), []
    for t in range(x.shape[1]):
        state = m.cell(x[:, t], state)
        outputs.append(hidden_of(state))
    return m.head(torch.stack(outputs, 1))


def last_only(m: Looped, x: torch.Tensor) -> torch.Tensor:
    state = m.given()
    for one in m.before(x).unbind(1):
        state = m.cell(one, state)
    return m.head(hidden_of(state))


def loss_per_step(m: Looped, x: torch.Tensor) -> torch.Tensor:
    state, total = m.given(), torch.zeros(ROWS, 2)
    for t in range(x.shape[1]):
        state = m.cell(x[:, t], state)
        total = total + m.head(hidden_of(state)).square() * (t + 1) / 20
    return total


def two_cells(m: Looped, x: torch.Tensor) -> torch.Tensor:
    x, one, other, outputs = m.before(x), m.given(), m.given(), []
    for t in range(x.shape[1]):
        one = m.cell(x[:, t], one)
        other = m.second(hidden_of(one), other)
        outputs.append(hidden_of(other))
    return m.head(torch.stack(outputs, 1))


def two_cells_and_both_read(m: Looped, x: torch.Tensor) -> torch.Tensor:
    one, other, lower, upper = m.given(), m.given(), [], []
    for t in range(x.shape[1]):
        one = m.cell(x[:, t], one)
        other = m.second(hidden_of(one), other)
        lower.append(hidden_of(one))
        upper.append(hidden_of(other))
    return m.head(torch.stack(upper, 1) + torch.stack(lower, 1))


def both_ways(m: Looped, x: torch.Tensor) -> torch.Tensor:
    x, one, other, ahead, back = m.before(x), m.given(), m.given(), [], []
    steps = x.shape[1]
    for t in range(steps):
        one = m.cell(x[:, t], one)
        other = m.cell(x[:, steps - 1 - t], other)
        ahead.append(hidden_of(one))
        back.append(hidden_of(other))
    return m.head(torch.stack(ahead, 1) + 2 * torch.stack(back[::-1], 1))


def in_reverse(m: Looped, x: torch.Tensor) -> torch.Tensor:
    x, state, outputs = m.before(x), m.given(), []
    for t in reversed(range(x.shape[1])):
        state = m.cell(x[:, t], state)
        outputs.append(hidden_of(state))
    return m.head(torch.stack(outputs, 1))


def encoder_and_decoder(m: Looped, x: torch.Tensor) -> torch.Tensor:
    state, outputs = m.given(), []
    for t in range(x.shape[1]):
        state = m.cell(x[:, t], state)
    context = hidden_of(state)
    for _ in range(x.shape[1]):
        state = m.second(context, state)
        outputs.append(hidden_of(state))
    return m.head(torch.stack(outputs, 1))


def some_steps_read(m: Looped, x: torch.Tensor) -> torch.Tensor:
    x, state, outputs = m.before(x), m.given(), []
    for t in range(x.shape[1]):
        state = m.cell(x[:, t], state)
        if t in (1, 2):
            outputs.append(hidden_of(state))
    return m.head(torch.stack(outputs, 1) * 3)


def some_inputs(m: Looped, x: torch.Tensor) -> torch.Tensor:
    """Every second step of a sequence, and one twice."""
    x, state, outputs = m.before(x), m.given(), []
    for t in (*range(0, x.shape[1], 2), 0):
        state = m.cell(x[:, t], state)
        outputs.append(hidden_of(state))
    return m.head(torch.stack(outputs, 1))


def one_input(m: Looped, x: torch.Tensor) -> torch.Tensor:
    x, state, outputs = m.before(x)[:, 0], m.given(), []
    for _ in range(4):
        state = m.cell(x, state)
        outputs.append(hidden_of(state))
    return m.head(torch.cat(outputs, -1).reshape(ROWS, -1, WIDTH))


def computed_inputs(m: Looped, x: torch.Tensor) -> torch.Tensor:
    state, outputs = m.given(), []
    for t in range(x.shape[1]):
        state = m.cell(m.before(x[:, t]).tanh(), state)
        outputs.append(m.head(hidden_of(state)))
    return torch.stack(outputs, 1)


def nothing_trained_before(m: Looped, x: torch.Tensor) -> torch.Tensor:
    m.cell.weight_hh.requires_grad_(False)
    return indexed(m, x)


def over_the_same_cell_twice(m: Looped, x: torch.Tensor) -> torch.Tensor:
    return stacked(m, x[:, :3]) * 2 + stacked(m, x[:, 1:4])


def no_outputs_but_gradients_kept(m: Looped, x: torch.Tensor) -> torch.Tensor:
    state, outputs = m.given(), []
    for t in range(x.shape[1]):
        state = m.cell(x[:, t], state)
        outputs.append(hidden_of(state))
    outputs[1].retain_grad()
    outputs[2].register_hook(lambda gradient: gradient * 0.5)
    return m.head(torch.stack(outputs, 1))


def cut_every_two(m: Looped, x: torch.Tensor) -> torch.Tensor:
    """Truncated backpropagation through time."""
    state, outputs = m.given(), []
    for t in range(x.shape[1]):
        state = m.cell(x[:, t], state)
        outputs.append(hidden_of(state))
        if t % 2:
            detach = torch.Tensor.detach
            state = tuple(map(detach, state)) if isinstance(state, tuple) else detach(state)
    return m.head(torch.stack(outputs, 1))


def checkpointed(m: Looped, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(indexed, m, x, use_reentrant=False)


def fed_back_after_three(m: Looped, x: torch.Tensor) -> torch.Tensor:
    """An input that depends on a state from three steps before."""
    state, outputs = m.given(), []
    for t in range(x.shape[1]):
        one = x[:, t] if t < 3 else x[:, t] + outputs[t - 3][:, :OF_INPUT]
        state = m.cell(one, state)
        outputs.append(hidden_of(state))
    return m.head(torch.stack(outputs, 1))


def attention_decoder(m: Looped, x: torch.Tensor) -> torch.Tensor:
    state, outputs = m.given(), []
    for _ in range(x.shape[1]):
        scores = torch.einsum("ni,nti->nt", hidden_of(state)[:, :OF_INPUT], x).softmax(-1)
        state = m.cell(torch.einsum("nt,nti->ni", scores, x), state)
        outputs.append(hidden_of(state))
    return m.head(torch.stack(outputs, 1))


def fed_back(m: Looped, x: torch.Tensor) -> torch.Tensor:
    """The input is the state itself."""
    state, outputs = m.cell(x[:, 0], m.given()), []
    for _ in range(4):
        state = m.second(hidden_of(state), state)
        outputs.append(hidden_of(state))
    return m.head(torch.stack(outputs, 1))


def hidden_state_changed(m: Looped, x: torch.Tensor) -> torch.Tensor:
    state, outputs = m.given(), []
    for t in range(x.shape[1]):
        state = changed(m.cell(x[:, t], state), lambda hidden: hidden * 0.9)
        outputs.append(hidden_of(state))
    return m.head(torch.stack(outputs, 1))


def hidden_state_written(m: Looped, x: torch.Tensor) -> torch.Tensor:
    state, outputs = m.given(), []
    for t in range(x.shape[1]):
        state = changed(m.cell(x[:, t], state), lambda hidden: hidden.clone().mul_(0.9))
        outputs.append(hidden_of(state))
    return m.head(torch.stack(outputs, 1))


def other_weights_each_step(m: Looped, x: torch.Tensor) -> torch.Tensor:
    state, outputs = m.given(), []
    for t in range(x.shape[1]):
        weights = [one * (1 + t) for one in m.cell.parameters()]
        state = functional(m, x[:, t], state, weights)
        outputs.append(hidden_of(state))
    return m.head(torch.stack(outputs, 1))


def functional(m: Looped, x: torch.Tensor, state: State, weights: list[torch.Tensor]) -> State:
    name = {"LSTMCell": "lstm_cell", "GRUCell": "gru_cell"}.get(type(m.cell).__name__)
    return getattr(torch, name or f"rnn_{m.cell.nonlinearity}_cell")(x, state, *weights)


def two_cells_that_feed_each_other(m: Looped, x: torch.Tensor) -> torch.Tensor:
    one, other, outputs = m.given(), m.given(), []
    for t in range(x.shape[1]):
        one = m.cell(x[:, t] + hidden_of(other)[:, :OF_INPUT], one)
        other = m.second(hidden_of(one), other)
        outputs.append(hidden_of(other))
    return m.head(torch.stack(outputs, 1))


def one_step(m: Looped, x: torch.Tensor) -> torch.Tensor:
    return m.head(hidden_of(m.cell(x[:, 0], m.given())))


def without_a_batch(m: Looped, x: torch.Tensor) -> torch.Tensor:
    state, outputs = None, []
    for one in x[0]:
        state = m.cell(one, state)
        outputs.append(hidden_of(state))
    return m.head(torch.stack(outputs))


# Loops, and how many forward and backward ops of layers they become.
LOOPS: dict[Callable[..., torch.Tensor], tuple[int, int]] = {
    stacked: (1, 1),
    indexed: (1, 1),
    last_only: (1, 1),
    loss_per_step: (1, 1),
    two_cells: (2, 2),
    two_cells_and_both_read: (2, 2),
    both_ways: (2, 2),
    in_reverse: (1, 1),
    encoder_and_decoder: (2, 2),
    some_steps_read: (1, 1),
    some_inputs: (1, 1),
    one_input: (1, 1),
    computed_inputs: (1, 1),
    nothing_trained_before: (1, 1),
    over_the_same_cell_twice: (2, 2),
    no_outputs_but_gradients_kept: (1, 2),
    cut_every_two: (1, 3),
    checkpointed: (1, 1),
    fed_back_after_three: (2, 2),
    without_a_batch: (0, 0),
    # Unrolled.
    attention_decoder: (0, 0),
    fed_back: (0, 0),
    hidden_state_changed: (0, 0),
    hidden_state_written: (0, 0),
    other_weights_each_step: (0, 0),
    two_cells_that_feed_each_other: (0, 0),
    one_step: (0, 0),
}


def training(
    kind: str, loop: Callable[..., torch.Tensor], dtype: torch.dtype = torch.float32, **options: Any
) -> Training:
    model = Looped(kind, loop, **options).to(dtype)
    # At a rate of 0.3 some of them diverge within three steps, which makes much of a last bit.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        result = model(x.to(dtype))
        loss = (result * torch.linspace(-1, 1.3, 2, dtype=dtype)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


def sequences(index: int, steps: int = 6) -> tuple[torch.Tensor, ...]:
    return (normal(index, ROWS, steps, OF_INPUT),)


def random_loop(program: list[tuple[int, ...]], m: Looped, x: torch.Tensor) -> torch.Tensor:
    """Run a random program; the last states of every call are read with weights of their own."""
    x, steps = m.before(x), x.shape[1]
    states: list[list[State]] = [[m.given()], [m.given()]]
    total = torch.zeros(ROWS, WIDTH, dtype=x.dtype)
    for time, (which, back, source, done) in enumerate(program):
        cell = m.second if which else m.cell
        known, others = states[which], states[1 - which]
        width = WIDTH if which else OF_INPUT
        here = x[:, time % steps]
        wide_input = torch.cat([here, here[:, :1]], 1)[:, :width]
        given = {
            0: here if width == OF_INPUT else hidden_of(others[-1]),
            1: wide_input * 2,
            2: hidden_of(known[-1]) if which else hidden_of(known[-1])[:, :width] * 0.5,
            3: hidden_of(others[-1]) if which else hidden_of(others[-1])[:, :width],
            4: hidden_of(known[max(0, len(known) - 4)])[:, :width] + wide_input,
        }[source]
        state = cell(given, known[max(0, len(known) - 1 - back)])
        if done == 1:
            state = changed(state, lambda hidden: hidden * 0.7)
        elif done == 2:
            state = tuple(s.detach() for s in state) if isinstance(state, tuple) else state.detach()
        elif done == 3:
            total = total + (state[-1] if isinstance(state, tuple) else state).sin()
        known.append(state)
        total = total + hidden_of(state) * (0.1 * time - 0.3) * (time % 3 != 1)
    return m.head(total)
