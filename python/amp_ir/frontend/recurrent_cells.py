# SPDX-License-Identifier: Apache-2.0
"""LSTM and GRU on a GPU in the ops that PyTorch spells them out with on a CPU.

Of a layer, ATen multiplies the whole sequence with the input's weights at once on a CPU, and step
by step on a GPU without cuDNN. PyTorch's own decomposition does the former.

On a GPU ATen has a cell after its two matmuls, and the gradient of that, as one op each. These mean
the same, and fusion makes kernels of them, as it does of a cell on a CPU. `workspace` is what a
forward op keeps for its gradient: what is in it is between the two of them.

Source: RNN.cpp of ATen for the formulas, derivatives.yaml for which gradient is whose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decompositions

aten = torch.ops.aten
_Tensors = tuple[torch.Tensor, ...]


def _lstm(*args: Any) -> _Tensors:
    """PyTorch's decomposition, with its last states in the shape of the first ones.

    Before 2.13 it keeps an axis of length 1 between layers and batch that ATen does not have.
    """
    output, *states = decompositions.lstm_impl(*args)
    shaped = [
        s if s.shape == h.shape else s.squeeze(1) for s, h in zip(states, args[1], strict=True)
    ]
    return output, *shaped


_LAYERS: dict[Any, Callable[..., Any]] = {
    torch.lstm: _lstm,
    torch.gru: decompositions.gru_impl,
}


def layers_of(func: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """What to call for `func(*args)`: another function for layers on a GPU; None: itself.

    Packed sequences, whose fourth argument is the list of parameters, are left alone.
    """
    if func not in _LAYERS or args[0].device.type == "cpu":
        return None
    return _LAYERS[func] if isinstance(args[3], bool) else None


def lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cell: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> _Tensors:
    """The new hidden and cell state f32[n, h], and the gates f32[n, 4 h] after their functions."""
    gates = _with_bias(input_gates, input_bias) + _with_bias(hidden_gates, hidden_bias)
    into, forget, made, out = gates.chunk(4, 1)
    into, forget, made, out = into.sigmoid(), forget.sigmoid(), made.tanh(), out.sigmoid()
    new_cell = forget * cell + into * made
    return out * new_cell.tanh(), new_cell, torch.cat([into, forget, made, out], 1)


def lstm_cell_backward(
    grad_hidden: torch.Tensor | None,
    grad_cell: torch.Tensor | None,
    cell: torch.Tensor,
    new_cell: torch.Tensor,
    workspace: torch.Tensor,
    has_bias: bool,  # noqa: FBT001 - ATen's own signature
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the gates before their functions, of the cell state, and of the bias."""
    into, forget, made, out = workspace.chunk(4, 1)
    seen = new_cell.tanh()
    grad_out, grad_new_cell = torch.zeros_like(out), grad_cell
    if grad_hidden is not None:
        grad_out = aten.sigmoid_backward(grad_hidden * seen, out)
        through = aten.tanh_backward(grad_hidden * out, seen)
        grad_new_cell = through if grad_cell is None else grad_cell + through
    assert grad_new_cell is not None
    gates = torch.cat(
        [
            aten.sigmoid_backward(grad_new_cell * made, into),
            aten.sigmoid_backward(grad_new_cell * cell, forget),
            aten.tanh_backward(grad_new_cell * into, made),
            grad_out,
        ],
        1,
    )
    return gates, grad_new_cell * forget, gates.sum(0) if has_bias else None


def gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hidden: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> _Tensors:
    """The new hidden state f32[n, h], and what the gradient needs, f32[n, 5 h]."""
    from_input = _with_bias(input_gates, input_bias).chunk(3, 1)
    from_hidden = _with_bias(hidden_gates, hidden_bias).chunk(3, 1)
    reset = (from_input[0] + from_hidden[0]).sigmoid()
    update = (from_input[1] + from_hidden[1]).sigmoid()
    made = (from_input[2] + reset * from_hidden[2]).tanh()
    new_hidden = made + update * (hidden - made)
    return new_hidden, torch.cat([reset, update, made, hidden, from_hidden[2]], 1)


def gru_cell_backward(
    grad_hidden: torch.Tensor,
    workspace: torch.Tensor,
    has_bias: bool,  # noqa: FBT001 - ATen's own signature
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of both kinds of gates, of the hidden state, and of both biases."""
    reset, update, made, hidden, from_hidden = workspace.chunk(5, 1)
    grad_update = aten.sigmoid_backward(grad_hidden * (hidden - made), update)
    grad_made = aten.tanh_backward(grad_hidden * (1 - update), made)
    grad_reset = aten.sigmoid_backward(grad_made * from_hidden, reset)
    of_input = torch.cat([grad_reset, grad_update, grad_made], 1)
    of_hidden = torch.cat([grad_reset, grad_update, grad_made * reset], 1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, grad_hidden * update, *biases


def _with_bias(gates: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return gates if bias is None else gates + bias


# What each of ATen's ops is traced as.
FUSED_CELLS: dict[Any, Callable[..., Any]] = {
    aten._thnn_fused_lstm_cell.default: lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: lstm_cell_backward,
    aten._thnn_fused_gru_cell.default: gru_cell,
    aten._thnn_fused_gru_cell_backward.default: gru_cell_backward,
}
