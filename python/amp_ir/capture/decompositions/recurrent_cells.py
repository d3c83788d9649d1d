# SPDX-License-Identifier: Apache-2.0
"""The cells of LSTM and GRU on a GPU, decomposed as PyTorch decomposes them on a CPU.

On a GPU ATen has a cell after its two matmuls, and the gradient of that, as one op each. The
functions here compute the same, and fusion makes kernels of them, as for a cell on a CPU.
`workspace` is what a forward op saves for its gradient: no other op reads it. Whole layers are in
recurrent_layers.py.

Source: RNN.cpp of ATen for the formulas, derivatives.yaml for the order of gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
_Tensors = tuple[torch.Tensor, ...]


def lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cell: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> _Tensors:
    """Return the new hidden and cell state f32[n, h], and the activated gates f32[n, 4 h]."""
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
    """Return gradients of the gates before activation, of the cell state, and of the bias."""
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
    """Return the new hidden state f32[n, h], and the workspace of the gradient, f32[n, 5 h]."""
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
    """Return gradients of both kinds of gates, of the hidden state, and of both biases."""
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


# The decomposition of each of ATen's ops.
FUSED_CELLS: dict[Any, Callable[..., Any]] = {
    aten._thnn_fused_lstm_cell.default: lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: lstm_cell_backward,
    aten._thnn_fused_gru_cell.default: gru_cell,
    aten._thnn_fused_gru_cell_backward.default: gru_cell_backward,
}
