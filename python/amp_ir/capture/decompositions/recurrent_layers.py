# SPDX-License-Identifier: Apache-2.0
"""LSTM, GRU and RNN layers as one op per layer and direction (recurrent_ops.py).

While a step is traced, `torch.lstm`, `torch.gru`, `torch.rnn_tanh` and `torch.rnn_relu` are the
functions here. A layer with projections (proj_size) is decomposed step by step. Layers of a packed
sequence run over its padded rows (packed_sequences.py).

Source: RNN.cpp of ATen for the order of layers, directions and parameters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from amp_ir.capture.decompositions.packed_sequences import PackedRows, Padding
from amp_ir.capture.decompositions.recurrent_ops import Gru, Lstm, Rnn, wide
from amp_ir.dialect.recurrence import time_steps

_Tensors = tuple[torch.Tensor, ...]
_AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)
# One layer and direction: (input [t, n, i], initial states, parameters, reverse) -> the output [t,
# n, h] and the last states. `replaced` maps the input's part of the gates [t, n, gates] to that
# which is used.
_Layer = Callable[..., _Tensors]
_Gates = Callable[[torch.Tensor], torch.Tensor]


def _as_they_are(gates: torch.Tensor) -> torch.Tensor:
    return gates


def _input_gates(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the input's part of the gates of all steps [t, n, gates]: one matmul."""
    steps, rows = x.shape[:2]
    return F.linear(x.reshape(steps * rows, -1), weight, bias).view(steps, rows, -1)


def low_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Return the dtype of the user's torch.autocast region around the layer, if there is one."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _lstm_layer(
    x: torch.Tensor,
    initial: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    reverse: bool,  # noqa: FBT001
    replaced: _Gates = _as_they_are,
) -> _Tensors:
    hidden, cell = initial
    of_input, of_state, *biases = params
    gates = replaced(_input_gates(x, of_input, biases[0] + biases[1] if biases else None))
    # The ops of PyTorch's decomposition promote; so does this.
    dtype = torch.promote_types(gates.dtype, cell.dtype)
    results = Lstm.apply(
        gates,
        of_state.to(gates.dtype),
        hidden.to(gates.dtype),
        cell.to(wide(gates.dtype)),
        reverse,
    )
    return tuple(one.to(dtype) for one in results)


def _gru_layer(
    x: torch.Tensor,
    initial: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    reverse: bool,  # noqa: FBT001
    replaced: _Gates = _as_they_are,
) -> _Tensors:
    (hidden,) = initial
    of_input, of_state, *biases = params
    gates = replaced(_input_gates(x, of_input, biases[0] if biases else None))
    dtype = torch.promote_types(gates.dtype, hidden.dtype)
    bias = biases[1] if biases else gates.new_zeros(of_state.shape[:1])
    tensors = (one.to(gates.dtype) for one in (of_state, bias, hidden))
    return tuple(one.to(dtype) for one in Gru.apply(gates, *tensors, reverse))


def _rnn_layer(
    kind: str,
    x: torch.Tensor,
    initial: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    reverse: bool,  # noqa: FBT001
    replaced: _Gates = _as_they_are,
) -> _Tensors:
    (hidden,) = initial
    of_input, of_state, *biases = params
    gates = replaced(_input_gates(x, of_input, biases[0] + biases[1] if biases else None))
    # Each state is a function of two products alone, so that it has their dtype.
    tensors = (one.to(gates.dtype) for one in (of_state, hidden))
    results: _Tensors = Rnn.apply(kind, gates, *tensors, reverse)
    return results


def _projected_lstm_layer(
    x: torch.Tensor,
    initial: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    reverse: bool,  # noqa: FBT001
    replaced: _Gates = _as_they_are,
) -> _Tensors:
    """Run an LSTM whose state is a projection of its gates' output, step by step."""
    hidden, cell = initial
    of_input, of_state, *biases, projection = params
    gates = replaced(_input_gates(x, of_input, biases[0] if biases else None))
    outputs: list[torch.Tensor] = []
    for k in time_steps(len(gates), reverse=reverse):
        both = F.linear(hidden, of_state, biases[1] if biases else None) + gates[k]
        into, forget, made, out = both.chunk(4, -1)
        cell = forget.sigmoid() * cell + into.sigmoid() * made.tanh()
        hidden = F.linear(out.sigmoid() * cell.tanh(), projection)
        outputs.append(hidden)
    return torch.stack(outputs[::-1] if reverse else outputs), hidden, cell


def _layers(
    layer: _Layer,
    x: torch.Tensor,
    initial: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    layer_count: int,
    dropout: float,
    *,
    bidirectional: bool,
    batch_first: bool,
) -> _Tensors:
    """Return the output of the last layer, and each kind of last state of all layers."""
    directions = 2 if bidirectional else 1
    each = len(params) // (layer_count * directions)
    x = x.transpose(0, 1) if batch_first else x
    last: list[_Tensors] = []
    for number in range(layer_count):
        outputs = []
        for k in range(number * directions, (number + 1) * directions):
            states = [one[k] for one in initial]
            output, *final = layer(
                x, states, params[k * each : (k + 1) * each], k % directions == 1
            )
            outputs.append(output)
            last.append(tuple(final))
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and number < layer_count - 1:
            x = torch.dropout(x, dropout, True)
    x = x.transpose(0, 1) if batch_first else x
    return x, *(torch.stack(kind) for kind in zip(*last, strict=True))


def _fit_together(
    x: torch.Tensor,
    initial: Sequence[torch.Tensor],
    of_states: Sequence[torch.Tensor],
    *,
    batch_first: bool,
) -> bool:
    """Return whether shapes fit a stack of layers; if they do not, PyTorch raises the error.

    `of_states` are the weights of the previous states, one per layer and direction.
    """
    if x.dim() != 3 or any(one.dim() != 3 for one in initial):
        return False
    stacked = (len(of_states), x.shape[0 if batch_first else 1])
    if any(one.shape[:2] != stacked for one in initial):
        return False
    return all(one.shape[-1] == initial[0].shape[-1] for one in of_states)


def take_one_dtype(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the layers compute in one floating dtype, and no extent is 0."""
    if any(one.numel() == 0 or not one.dtype.is_floating_point for one in tensors):
        return False
    if len({one.dtype for one in tensors}) == 1:
        return True
    return low_dtype(tensors[0]) is not None and all(one.dtype in _AUTOCAST for one in tensors)


def _padded(layer: _Layer, padding: Padding, past_end: Callable[..., torch.Tensor]) -> _Layer:
    """Return a layer whose rows end at their own lengths: past that its output is 0.

    The reverse direction is the forward one over each row reversed within its length. What gates
    are past the end lets an LSTM's cells stay as they are, so that the last ones are each row's
    own; the hidden state is picked at each row's end.
    """

    def run(
        x: torch.Tensor,
        initial: Sequence[torch.Tensor],
        params: Sequence[torch.Tensor],
        reverse: bool,  # noqa: FBT001
    ) -> _Tensors:
        x = padding.reversed(x) if reverse else x
        output, _, *others = layer(
            x, initial, params, False, lambda gates: past_end(gates, padding.is_past(gates))
        )
        output = output.masked_fill(padding.is_past(output), 0.0)
        last = padding.at_end(output)
        return padding.reversed(output) if reverse else output, last, *others

    return run


def _hold_cells(gates: torch.Tensor, is_past: torch.Tensor) -> torch.Tensor:
    """Close an LSTM's input gate past the end, and open its forget gate: cells stay."""
    into, forget, *others = gates.chunk(4, -1)
    held = [into.masked_fill(is_past, -math.inf), forget.masked_fill(is_past, math.inf)]
    return torch.cat([*held, *others], -1)


def _clear_state(gates: torch.Tensor, is_past: torch.Tensor) -> torch.Tensor:
    """Let the state of a relu be 0 past the end: it might grow without bound."""
    return gates.masked_fill(is_past, -math.inf)


def _leave_state(gates: torch.Tensor, _is_past: torch.Tensor) -> torch.Tensor:
    """Let a bounded state be any past the end: no result and no gradient reads it."""
    return gates


_LAYERS: dict[Any, tuple[_Layer, Callable[..., torch.Tensor]]] = {
    torch.lstm: (_lstm_layer, _hold_cells),
    torch.gru: (_gru_layer, _leave_state),
    torch.rnn_tanh: (functools.partial(_rnn_layer, "rnn_tanh"), _leave_state),
    torch.rnn_relu: (functools.partial(_rnn_layer, "rnn_relu"), _clear_state),
}


def layers_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return the function that computes `func(*args)` for a stack of recurrent layers, or None.

    None leaves the call to PyTorch, which rejects it.
    """
    if func not in _LAYERS or kwargs or len(args) != 9:
        return None
    packed = args[0] if isinstance(args[0], PackedRows) else None
    if packed is None:
        x, given, params, has_biases, *options, batch_first = args
    else:
        _data, _batch_sizes, given, params, has_biases, *options = args
        x, batch_first = packed.past_end_is_0(), False
    layer_count, dropout, train, bidirectional = options
    if not isinstance(has_biases, bool):
        return None
    initial = tuple(given) if func is torch.lstm else (given,)
    is_projected = func is torch.lstm and initial[0].shape[-1] != initial[1].shape[-1]
    each = 2 + 2 * has_biases + is_projected
    if len(params) != each * layer_count * (2 if bidirectional else 1):
        return None
    if not _fit_together(x, initial, params[1::each], batch_first=batch_first):
        return None
    if not take_one_dtype([x, *initial, *params]):
        return None
    layer, past_end = _LAYERS[func]
    layer = _projected_lstm_layer if is_projected else layer
    if packed is not None:
        layer = _padded(layer, packed.padding, past_end)

    def run() -> _Tensors:
        output, *last = _layers(
            layer,
            x,
            initial,
            params,
            layer_count,
            dropout if train else 0.0,
            bidirectional=bidirectional,
            batch_first=batch_first,
        )
        return output if packed is None else packed.with_rows(output), *last

    return run
