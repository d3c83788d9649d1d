# SPDX-License-Identifier: Apache-2.0
"""LSTM and GRU layers as one op per layer and direction: `torch.ops.amp_ir.lstm` and others.

While a step is traced, `torch.lstm` and `torch.gru` are the functions here. Each op is surrounded
by ordinary matmuls over all time steps: the input's part of the gates, and the gradients of
weights, biases and input. The CPU kernels are the reference implementation of the ops (plain
PyTorch); tests run them, and autograd differentiates them for a gradient of a gradient
(create_graph=True).

A layer with projections (proj_size) is decomposed step by step. Packed sequences are left to
PyTorch, which decomposes them too.

Source: RNN.cpp of ATen for the order of layers, directions and parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from amp_ir.dialect.recurrence import (
    gru_backward_of,
    gru_of,
    last_index,
    lstm_backward_of,
    lstm_of,
    output_slice,
    previous_slice,
    time_steps,
)

_Tensors = tuple[torch.Tensor, ...]
_AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)
_library = torch.library.Library("amp_ir", "FRAGMENT")


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of cells beside gates of `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def _computed(
    meaning: Callable[..., _Tensors],
    tensors: Sequence[torch.Tensor],
    *,
    reverse: bool,
    wide_results: Sequence[int] = (),
) -> _Tensors:
    """Run the reference implementation in float32 or wider; only `wide_results` keep that dtype."""
    dtype = tensors[0].dtype
    results = meaning(*(one.to(_wide(dtype)) for one in tensors), reverse=reverse)
    return tuple(
        one if k in wide_results else one.to(dtype).contiguous() for k, one in enumerate(results)
    )


def _lstm(gates: Any, weight: Any, hidden: Any, cell: Any, reverse: bool) -> _Tensors:  # noqa: FBT001
    return _computed(lstm_of, (gates, weight, hidden, cell), reverse=reverse, wide_results=(1,))


def _lstm_backward(
    grad: Any, grad_hidden: Any, grad_cell: Any, activated: Any, cells: Any, weight: Any,
    reverse: bool,  # noqa: FBT001
) -> _Tensors:  # fmt: skip
    tensors = (grad, grad_hidden, grad_cell, activated, cells, weight)
    return _computed(lstm_backward_of, tensors, reverse=reverse, wide_results=(2,))


def _gru(gates: Any, weight: Any, bias: Any, hidden: Any, reverse: bool) -> _Tensors:  # noqa: FBT001
    return _computed(gru_of, (gates, weight, bias, hidden), reverse=reverse)


def _gru_backward(
    grad: Any, grad_hidden: Any, activated: Any, states: Any, weight: Any,
    reverse: bool,  # noqa: FBT001
) -> _Tensors:  # fmt: skip
    tensors = (grad, grad_hidden, activated, states, weight)
    return _computed(gru_backward_of, tensors, reverse=reverse)


def _lstm_types(gates: Any, _weight: Any, hidden: Any, cell: Any, *_reverse: Any) -> _Tensors:
    after = (gates.shape[0] + 1, *hidden.shape)
    return gates.new_empty(after), cell.new_empty(after), gates.new_empty(gates.shape)


def _lstm_backward_types(
    grad: Any, grad_hidden: Any, grad_cell: Any, activated: Any, *_rest: Any
) -> _Tensors:
    of_gates = grad.new_empty(activated.shape)
    return of_gates, grad.new_empty(grad_hidden.shape), grad_cell.new_empty(grad_cell.shape)


def _gru_types(gates: Any, _weight: Any, _bias: Any, hidden: Any, *_reverse: Any) -> _Tensors:
    steps, (rows, width) = gates.shape[0], hidden.shape
    return gates.new_empty((steps + 1, rows, width)), gates.new_empty((steps, rows, 4 * width))


def _gru_backward_types(grad: Any, grad_hidden: Any, *_rest: Any) -> _Tensors:
    of_gates = (*grad.shape[:2], 3 * grad.shape[2])
    gradients = grad.new_empty(of_gates), grad.new_empty(of_gates)
    return *gradients, grad.new_empty(grad_hidden.shape)


_OPS: tuple[tuple[str, str, Any, Any], ...] = (
    ("lstm", "gates weight hidden cell", _lstm, _lstm_types),
    (
        "lstm_backward",
        "grad grad_hidden grad_cell activated cells weight",
        _lstm_backward,
        _lstm_backward_types,
    ),
    ("gru", "gates weight bias hidden", _gru, _gru_types),
    (
        "gru_backward",
        "grad grad_hidden activated states weight",
        _gru_backward,
        _gru_backward_types,
    ),
)
for _name, _arguments, _kernel, _types in _OPS:
    _results = ", ".join(["Tensor"] * (2 if _name == "gru" else 3))
    _given = ", ".join(f"Tensor {one}" for one in _arguments.split())
    _library.define(f"{_name}({_given}, bool reverse) -> ({_results})")
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"amp_ir::{_name}", _types, lib=_library)


def _of_weight(grad: torch.Tensor, states: torch.Tensor, *, reverse: bool) -> torch.Tensor:
    """Return the gradient of the weight of the previous states, over all steps at once."""
    previous = states[previous_slice(reverse=reverse)]
    return grad.flatten(0, 1).t() @ previous.flatten(0, 1)


class _Lstm(torch.autograd.Function):
    """The op with a derivative that is an op too; the second derivative is plain PyTorch."""

    @staticmethod
    def forward(
        ctx: Any, gates: Any, weight: Any, hidden: Any, cell: Any, reverse: bool  # noqa: FBT001
    ) -> Any:  # fmt: skip
        states, cells, activated = torch.ops.amp_ir.lstm(gates, weight, hidden, cell, reverse)
        ctx.save_for_backward(gates, weight, hidden, cell, states, cells, activated)
        ctx.reverse = reverse
        last = last_index(reverse=reverse)
        # Copies, which the capture drops: a tensor that a user may write to must not be a view.
        output = states[output_slice(reverse=reverse)].clone()
        return output, states[last].clone(), cells[last].clone()

    @staticmethod
    def backward(ctx: Any, grad: Any, grad_hidden: Any, grad_cell: Any) -> Any:
        gates, weight, hidden, cell, states, cells, activated = ctx.saved_tensors
        reverse, above = ctx.reverse, (grad, grad_hidden, grad_cell)
        if torch.is_grad_enabled():
            states, cells, activated = _lstm(gates, weight, hidden, cell, reverse)
            of_gates, *initial = _lstm_backward(*above, activated, cells, weight, reverse)
        else:
            backward = torch.ops.amp_ir.lstm_backward
            of_gates, *initial = backward(*above, activated, cells, weight, reverse)
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = _of_weight(of_gates, states, reverse=reverse)
        return of_gates, of_weight, *initial, None


class _Gru(torch.autograd.Function):
    """The GRU op, as `_Lstm`; the bias of the state's matmul has its own gradient."""

    @staticmethod
    def forward(
        ctx: Any, gates: Any, weight: Any, bias: Any, hidden: Any, reverse: bool  # noqa: FBT001
    ) -> Any:  # fmt: skip
        states, activated = torch.ops.amp_ir.gru(gates, weight, bias, hidden, reverse)
        ctx.save_for_backward(gates, weight, bias, hidden, states, activated)
        ctx.reverse = reverse
        output = states[output_slice(reverse=reverse)].clone()
        return output, states[last_index(reverse=reverse)].clone()

    @staticmethod
    def backward(ctx: Any, grad: Any, grad_hidden: Any) -> Any:
        gates, weight, bias, hidden, states, activated = ctx.saved_tensors
        reverse, above = ctx.reverse, (grad, grad_hidden)
        if torch.is_grad_enabled():
            states, activated = _gru(gates, weight, bias, hidden, reverse)
            of_gates, of_state, initial = _gru_backward(*above, activated, states, weight, reverse)
        else:
            backward = torch.ops.amp_ir.gru_backward
            of_gates, of_state, initial = backward(*above, activated, states, weight, reverse)
        of_weight = of_bias = None
        if ctx.needs_input_grad[1]:
            of_weight = _of_weight(of_state, states, reverse=reverse)
        if ctx.needs_input_grad[2]:
            of_bias = of_state.sum((0, 1))
        return of_gates, of_weight, of_bias, initial, None


# One layer and direction: (input [t, n, i], initial states, parameters, reverse) -> the output [t,
# n, h] and the last states.
_Layer = Callable[..., _Tensors]


def _input_gates(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the input's part of the gates of all steps [t, n, gates]: one matmul."""
    steps, rows = x.shape[:2]
    return F.linear(x.reshape(steps * rows, -1), weight, bias).view(steps, rows, -1)


def _low_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Return the dtype of the user's torch.autocast region around the layer, if there is one."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _lstm_layer(
    x: torch.Tensor, initial: Sequence[torch.Tensor], params: Sequence[torch.Tensor], reverse: bool  # noqa: FBT001
) -> _Tensors:  # fmt: skip
    hidden, cell = initial
    of_input, of_state, *biases = params
    gates = _input_gates(x, of_input, biases[0] + biases[1] if biases else None)
    # The ops of PyTorch's decomposition promote; so does this.
    dtype = torch.promote_types(gates.dtype, cell.dtype)
    results = _Lstm.apply(
        gates,
        of_state.to(gates.dtype),
        hidden.to(gates.dtype),
        cell.to(_wide(gates.dtype)),
        reverse,
    )
    return tuple(one.to(dtype) for one in results)


def _gru_layer(
    x: torch.Tensor, initial: Sequence[torch.Tensor], params: Sequence[torch.Tensor], reverse: bool  # noqa: FBT001
) -> _Tensors:  # fmt: skip
    (hidden,) = initial
    of_input, of_state, *biases = params
    gates = _input_gates(x, of_input, biases[0] if biases else None)
    dtype = torch.promote_types(gates.dtype, hidden.dtype)
    bias = biases[1] if biases else gates.new_zeros(of_state.shape[:1])
    tensors = (one.to(gates.dtype) for one in (of_state, bias, hidden))
    return tuple(one.to(dtype) for one in _Gru.apply(gates, *tensors, reverse))


def _projected_lstm_layer(
    x: torch.Tensor, initial: Sequence[torch.Tensor], params: Sequence[torch.Tensor], reverse: bool  # noqa: FBT001
) -> _Tensors:  # fmt: skip
    """Run an LSTM whose state is a projection of its gates' output, step by step."""
    hidden, cell = initial
    of_input, of_state, *biases, projection = params
    gates = _input_gates(x, of_input, biases[0] if biases else None)
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


def _take_one_dtype(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the layers compute in one floating dtype, and no extent is 0."""
    if any(one.numel() == 0 or not one.dtype.is_floating_point for one in tensors):
        return False
    if len({one.dtype for one in tensors}) == 1:
        return True
    return _low_dtype(tensors[0]) is not None and all(one.dtype in _AUTOCAST for one in tensors)


def layers_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return the function that computes `func(*args)` for a stack of LSTM or GRU layers, or None.

    None leaves the call to PyTorch: packed sequences, whose fourth argument is the list of
    parameters, and calls that PyTorch rejects.
    """
    if func not in (torch.lstm, torch.gru) or kwargs or len(args) != 9:
        return None
    x, given, params, has_biases, layer_count, dropout, train, bidirectional, batch_first = args
    if not isinstance(has_biases, bool):
        return None
    initial = (given,) if func is torch.gru else tuple(given)
    is_projected = func is torch.lstm and initial[0].shape[-1] != initial[1].shape[-1]
    each = 2 + 2 * has_biases + is_projected
    if len(params) != each * layer_count * (2 if bidirectional else 1):
        return None
    if not _fit_together(x, initial, params[1::each], batch_first=batch_first):
        return None
    if not _take_one_dtype([x, *initial, *params]):
        return None
    layer = _gru_layer if func is torch.gru else _lstm_layer
    return lambda: _layers(
        _projected_lstm_layer if is_projected else layer,
        x,
        initial,
        params,
        layer_count,
        dropout if train else 0.0,
        bidirectional=bidirectional,
        batch_first=batch_first,
    )
