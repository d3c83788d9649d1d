# SPDX-License-Identifier: Apache-2.0
"""One layer and direction of an LSTM, GRU or plain RNN over all time steps, and its gradient.

Shapes: t steps of n rows, h wide; time comes first. The input's part of the gates is computed
outside, as one matmul for all steps, and so are the gradients of weights and biases.

- `states` f[t + 1, n, h] (and an LSTM's `cells`) hold the initial state too. Forward, the initial
  state is states[0], and step k writes states[k + 1] from states[k]. With `reverse` time runs
  backwards: the initial state is states[t], and step k writes states[k] from states[k + 1].
- `activated` f[t, n, 4h] is what a step stores for its gradient. LSTM: input, forget, new cell and
  output gate after their functions. GRU: reset, update, new state after their functions, and the
  previous state's part of the new one, W_n h + b_n. A plain RNN's gradient reads its states.
- A matmul reads states and gradients of gates as they are stored: `stored` rounds them.
- Cells and their gradients are float32 (float64 for float64) whatever the rest is, since they are
  sums over time; a kernel carries the gradient of the state from step to step in float32 too.

Source: Hochreiter and Schmidhuber 1997 with forget gates (Gers et al. 2000); Cho et al. 2014; the
order of the gates and where a GRU's reset gate applies are those of ATen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from amp_ir.dialect.define import Tensor, define

_Tensors = tuple[torch.Tensor, ...]
_Stored = Callable[[torch.Tensor], torch.Tensor]
LSTM_GATES, GRU_GATES, RNN_GATES, ACTIVATED = 4, 3, 1, 4


def time_steps(length: int, *, reverse: bool) -> range:
    """Return the steps in the order in which the recurrence runs them."""
    return range(length - 1, -1, -1) if reverse else range(length)


def output_slice(*, reverse: bool) -> slice:
    """Return the slice of `states` that the steps wrote; entry k is that of step k."""
    return slice(0, -1) if reverse else slice(1, None)


def previous_slice(*, reverse: bool) -> slice:
    """Return the slice of `states` that the steps read; entry k is that of step k."""
    return slice(1, None) if reverse else slice(0, -1)


def last_index(*, reverse: bool) -> int:
    """Return the index in `states` that the last step wrote."""
    return 0 if reverse else -1


def _as_it_is(value: torch.Tensor) -> torch.Tensor:
    return value


def _in_time(walked: Sequence[torch.Tensor], *, reverse: bool) -> torch.Tensor:
    """Order the results of the steps, given in execution order, by time."""
    return torch.stack(list(reversed(walked)) if reverse else list(walked))


def lstm_of(
    gates: torch.Tensor,
    weight: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor,
    *,
    reverse: bool,
    stored: _Stored = _as_it_is,
) -> _Tensors:
    """Compute `amp_ir.lstm` with PyTorch; differentiable."""
    states, cells, activated = [hidden], [cell], []
    for k in time_steps(len(gates), reverse=reverse):
        into, forget, made, out = (gates[k] + stored(states[-1]) @ weight.mT).chunk(4, -1)
        into, forget, made, out = into.sigmoid(), forget.sigmoid(), made.tanh(), out.sigmoid()
        cells.append(forget * cells[-1] + into * made)
        states.append(out * cells[-1].tanh())
        activated.append(torch.cat([into, forget, made, out], -1))
    return tuple(_in_time(one, reverse=reverse) for one in (states, cells, activated))


def lstm_backward_of(
    grad: torch.Tensor,
    grad_hidden: torch.Tensor,
    grad_cell: torch.Tensor,
    activated: torch.Tensor,
    cells: torch.Tensor,
    weight: torch.Tensor,
    *,
    reverse: bool,
    stored: _Stored = _as_it_is,
) -> _Tensors:
    """Compute `amp_ir.lstm_backward` with PyTorch; differentiable."""
    new, before = cells[output_slice(reverse=reverse)], cells[previous_slice(reverse=reverse)]
    walked: list[torch.Tensor] = []
    for k in reversed(time_steps(len(grad), reverse=reverse)):
        into, forget, made, out = activated[k].chunk(4, -1)
        seen = new[k].tanh()
        of_state = grad[k] + grad_hidden
        of_cell = grad_cell + of_state * out * (1 - seen * seen)
        walked.append(
            torch.cat(
                [
                    of_cell * made * into * (1 - into),
                    of_cell * before[k] * forget * (1 - forget),
                    of_cell * into * (1 - made * made),
                    of_state * seen * out * (1 - out),
                ],
                -1,
            )
        )
        grad_cell = of_cell * forget
        grad_hidden = stored(walked[-1]) @ weight
    return _in_time(walked, reverse=not reverse), grad_hidden, grad_cell


def gru_of(
    gates: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    hidden: torch.Tensor,
    *,
    reverse: bool,
    stored: _Stored = _as_it_is,
) -> _Tensors:
    """Compute `amp_ir.gru` with PyTorch; differentiable."""
    states, activated = [hidden], []
    for k in time_steps(len(gates), reverse=reverse):
        before = states[-1]
        from_input = gates[k].chunk(3, -1)
        from_state = (stored(before) @ weight.mT + bias).chunk(3, -1)
        reset = (from_input[0] + from_state[0]).sigmoid()
        update = (from_input[1] + from_state[1]).sigmoid()
        made = (from_input[2] + reset * from_state[2]).tanh()
        states.append(made + update * (before - made))
        activated.append(torch.cat([reset, update, made, from_state[2]], -1))
    return tuple(_in_time(one, reverse=reverse) for one in (states, activated))


def gru_backward_of(
    grad: torch.Tensor,
    grad_hidden: torch.Tensor,
    activated: torch.Tensor,
    states: torch.Tensor,
    weight: torch.Tensor,
    *,
    reverse: bool,
    stored: _Stored = _as_it_is,
) -> _Tensors:
    """Compute `amp_ir.gru_backward` with PyTorch; differentiable."""
    before = states[previous_slice(reverse=reverse)]
    of_gates, of_recurrent = [], []
    for k in reversed(time_steps(len(grad), reverse=reverse)):
        reset, update, made, from_state = activated[k].chunk(4, -1)
        of_state = grad[k] + grad_hidden
        of_update = of_state * (before[k] - made) * update * (1 - update)
        of_made = of_state * (1 - update) * (1 - made * made)
        of_reset = of_made * from_state * reset * (1 - reset)
        of_gates.append(torch.cat([of_reset, of_update, of_made], -1))
        of_recurrent.append(torch.cat([of_reset, of_update, of_made * reset], -1))
        grad_hidden = of_state * update + stored(of_recurrent[-1]) @ weight
    gradients = (_in_time(one, reverse=not reverse) for one in (of_gates, of_recurrent))
    return *gradients, grad_hidden


def rnn_of(
    gates: torch.Tensor,
    weight: torch.Tensor,
    hidden: torch.Tensor,
    *,
    reverse: bool,
    activate: Callable[[torch.Tensor], torch.Tensor],
    stored: _Stored = _as_it_is,
) -> torch.Tensor:
    """Compute `amp_ir.rnn_tanh` and `amp_ir.rnn_relu` with PyTorch; differentiable."""
    states = [hidden]
    for k in time_steps(len(gates), reverse=reverse):
        states.append(activate(gates[k] + stored(states[-1]) @ weight.mT))
    return _in_time(states, reverse=reverse)


def rnn_backward_of(
    grad: torch.Tensor,
    grad_hidden: torch.Tensor,
    states: torch.Tensor,
    weight: torch.Tensor,
    *,
    reverse: bool,
    of_sum: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    stored: _Stored = _as_it_is,
) -> _Tensors:
    """Compute the gradients of both with PyTorch; differentiable.

    `of_sum` maps the gradient of a state, and the state, to the gradient of what was activated.
    """
    new = states[output_slice(reverse=reverse)]
    walked: list[torch.Tensor] = []
    for k in reversed(time_steps(len(grad), reverse=reverse)):
        walked.append(of_sum(grad[k] + grad_hidden, new[k]))
        grad_hidden = stored(walked[-1]) @ weight
    return _in_time(walked, reverse=not reverse), grad_hidden


def _of_tanh(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return grad * (1 - y * y)


def _of_relu(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(y <= 0, 0.0, grad)


rnn_tanh_of = functools.partial(rnn_of, activate=torch.tanh)
rnn_relu_of = functools.partial(rnn_of, activate=torch.relu)
rnn_tanh_backward_of = functools.partial(rnn_backward_of, of_sum=_of_tanh)
rnn_relu_backward_of = functools.partial(rnn_backward_of, of_sum=_of_relu)


def _check_alike(first: Tensor, *others: Tensor) -> None:
    first.expect_float()
    for one in others:
        one.expect_dtype(first.dtype)


def _check_wide(*tensors: Tensor) -> None:
    """Require float32 cells beside low gates."""
    for one in tensors:
        one.expect_float()


def _check_sequence(x: Tensor, what: str) -> tuple[int, int, int]:
    if x.ndim != 3:
        x.refuse("shape", what)
    steps, rows, width = x.shape
    return steps, rows, width


def _check_forward(gates: Tensor, weight: Tensor, hidden: Tensor, count: int) -> tuple[int, ...]:
    """Return (t, n, h) of a forward op with `count` gates."""
    steps, rows, width = _check_sequence(gates, f"(steps, rows, {count} times the width)")
    if hidden.ndim != 2:
        hidden.refuse("shape", "(rows, width)")
    of_state = hidden.shape[1]
    if width != count * of_state:
        gates.refuse("shape", (steps, rows, count * of_state))
    hidden.expect_shape((rows, of_state))
    weight.expect_shape((count * of_state, of_state))
    return steps, rows, of_state


@define("amp_ir.lstm", "gates", "weight", "hidden", "cell", reference=lstm_of, stores_inside=True)
def lstm(
    gates: Tensor, weight: Tensor, hidden: Tensor, cell: Tensor, *, reverse: bool
) -> tuple[Tensor, ...]:
    """Run an LSTM: gates f[t, n, 4h] = x W^T + b, weight f[4h, h], hidden f[n, h], cell f32[n, h].

    -> (states f[t + 1, n, h], cells f32[t + 1, n, h], activated f[t, n, 4h]).
    """
    steps, rows, width = _check_forward(gates, weight, hidden, LSTM_GATES)
    _check_alike(gates, weight, hidden)
    _check_wide(cell)
    cell.expect_shape(hidden.shape)
    states = gates.with_shape((steps + 1, rows, width))
    cells = Tensor(states.shape, gates.statistic_dtype)
    return states, cells, gates.with_shape((steps, rows, ACTIVATED * width))


@define(
    "amp_ir.lstm_backward",
    "grad", "grad_hidden", "grad_cell", "activated", "cells", "weight",
    reference=lstm_backward_of, stores_inside=True,
)  # fmt: skip
def lstm_backward(
    grad: Tensor,
    grad_hidden: Tensor,
    grad_cell: Tensor,
    activated: Tensor,
    cells: Tensor,
    weight: Tensor,
    *,
    reverse: bool,
) -> tuple[Tensor, ...]:
    """Return (grad_gates f[t, n, 4h], the gradients of hidden f[n, h] and of cell f32[n, h]).

    grad f[t, n, h] is of the steps' states, grad_hidden f[n, h] and grad_cell f32[n, h] of the
    last ones; the rest are results of the forward op.
    """
    steps, rows, width = _check_sequence(grad, "(steps, rows, width)")
    _check_alike(grad, grad_hidden, activated, weight)
    _check_wide(grad_cell, cells)
    for last in (grad_hidden, grad_cell):
        last.expect_shape((rows, width))
    activated.expect_shape((steps, rows, ACTIVATED * width))
    cells.expect_shape((steps + 1, rows, width))
    weight.expect_shape((LSTM_GATES * width, width))
    of_cell = Tensor((rows, width), grad.statistic_dtype)
    return (
        grad.with_shape((steps, rows, LSTM_GATES * width)),
        grad.with_shape((rows, width)),
        of_cell,
    )


@define("amp_ir.gru", "gates", "weight", "bias", "hidden", reference=gru_of, stores_inside=True)
def gru(
    gates: Tensor, weight: Tensor, bias: Tensor, hidden: Tensor, *, reverse: bool
) -> tuple[Tensor, ...]:
    """Run a GRU: gates f[t, n, 3h] = x W^T + b, weight f[3h, h], bias f[3h] of the state f[n, h].

    -> (states f[t + 1, n, h], activated f[t, n, 4h]).
    """
    steps, rows, width = _check_forward(gates, weight, hidden, GRU_GATES)
    _check_alike(gates, weight, bias, hidden)
    bias.expect_shape((GRU_GATES * width,))
    states = gates.with_shape((steps + 1, rows, width))
    return states, gates.with_shape((steps, rows, ACTIVATED * width))


@define(
    "amp_ir.gru_backward",
    "grad", "grad_hidden", "activated", "states", "weight",
    reference=gru_backward_of, stores_inside=True,
)  # fmt: skip
def gru_backward(
    grad: Tensor,
    grad_hidden: Tensor,
    activated: Tensor,
    states: Tensor,
    weight: Tensor,
    *,
    reverse: bool,
) -> tuple[Tensor, ...]:
    """Return (grad_gates f[t, n, 3h], grad_recurrent f[t, n, 3h], gradient of hidden f[n, h]).

    grad_gates is of the input's part of the gates, grad_recurrent of the state's part, W h + b.
    grad f[t, n, h] is of the steps' states, grad_hidden f[n, h] of the last one.
    """
    steps, rows, width = _check_sequence(grad, "(steps, rows, width)")
    _check_alike(grad, grad_hidden, activated, states, weight)
    grad_hidden.expect_shape((rows, width))
    activated.expect_shape((steps, rows, ACTIVATED * width))
    states.expect_shape((steps + 1, rows, width))
    weight.expect_shape((GRU_GATES * width, width))
    of_gates = grad.with_shape((steps, rows, GRU_GATES * width))
    return of_gates, of_gates, grad.with_shape((rows, width))


def _rnn(gates: Tensor, weight: Tensor, hidden: Tensor) -> Tensor:
    steps, rows, width = _check_forward(gates, weight, hidden, RNN_GATES)
    _check_alike(gates, weight, hidden)
    return gates.with_shape((steps + 1, rows, width))


@define("amp_ir.rnn_tanh", "gates", "weight", "hidden", reference=rnn_tanh_of, stores_inside=True)
def rnn_tanh(gates: Tensor, weight: Tensor, hidden: Tensor, *, reverse: bool) -> Tensor:
    """Run h = tanh(gates + W h): gates f[t, n, h], weight f[h, h], hidden f[n, h].

    -> states f[t + 1, n, h].
    """
    return _rnn(gates, weight, hidden)


@define("amp_ir.rnn_relu", "gates", "weight", "hidden", reference=rnn_relu_of, stores_inside=True)
def rnn_relu(gates: Tensor, weight: Tensor, hidden: Tensor, *, reverse: bool) -> Tensor:
    """Run h = relu(gates + W h): gates f[t, n, h], weight f[h, h], hidden f[n, h].

    -> states f[t + 1, n, h].
    """
    return _rnn(gates, weight, hidden)


def _rnn_backward(
    grad: Tensor, grad_hidden: Tensor, states: Tensor, weight: Tensor
) -> tuple[Tensor, ...]:
    steps, rows, width = _check_sequence(grad, "(steps, rows, width)")
    _check_alike(grad, grad_hidden, states, weight)
    grad_hidden.expect_shape((rows, width))
    states.expect_shape((steps + 1, rows, width))
    weight.expect_shape((RNN_GATES * width, width))
    return grad.with_shape((steps, rows, width)), grad.with_shape((rows, width))


@define(
    "amp_ir.rnn_tanh_backward",
    "grad", "grad_hidden", "states", "weight",
    reference=rnn_tanh_backward_of, stores_inside=True,
)  # fmt: skip
def rnn_tanh_backward(
    grad: Tensor, grad_hidden: Tensor, states: Tensor, weight: Tensor, *, reverse: bool
) -> tuple[Tensor, ...]:
    """Return (grad_gates f[t, n, h], gradient of hidden f[n, h]).

    grad f[t, n, h] is of the steps' states, grad_hidden f[n, h] of the last one.
    """
    return _rnn_backward(grad, grad_hidden, states, weight)


@define(
    "amp_ir.rnn_relu_backward",
    "grad", "grad_hidden", "states", "weight",
    reference=rnn_relu_backward_of, stores_inside=True,
)  # fmt: skip
def rnn_relu_backward(
    grad: Tensor, grad_hidden: Tensor, states: Tensor, weight: Tensor, *, reverse: bool
) -> tuple[Tensor, ...]:
    """Return (grad_gates f[t, n, h], gradient of hidden f[n, h]).

    grad f[t, n, h] is of the steps' states, grad_hidden f[n, h] of the last one.
    """
    return _rnn_backward(grad, grad_hidden, states, weight)
