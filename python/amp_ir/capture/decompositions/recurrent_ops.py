# SPDX-License-Identifier: Apache-2.0
"""One layer and direction of LSTM, GRU and plain RNN: `torch.ops.amp_ir.lstm` and others.

Each op is surrounded by ordinary matmuls over all time steps: the input's part of the gates, and
the gradients of weights, biases and input. The CPU kernels are the reference implementation of the
ops (plain PyTorch); tests run them, and autograd differentiates them for a gradient of a gradient
(create_graph=True). recurrent_layers.py makes layers of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from amp_ir.capture.define_op import define_op
from amp_ir.dialect.recurrence import (
    gru_backward_of,
    gru_of,
    last_index,
    lstm_backward_of,
    lstm_of,
    output_slice,
    previous_slice,
    rnn_relu_backward_of,
    rnn_relu_of,
    rnn_tanh_backward_of,
    rnn_tanh_of,
)

_Tensors = tuple[torch.Tensor, ...]


def wide(dtype: torch.dtype) -> torch.dtype:
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
    results = meaning(*(one.to(wide(dtype)) for one in tensors), reverse=reverse)
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


def _rnn(meaning: Callable[..., torch.Tensor], backward: Callable[..., _Tensors]) -> Any:
    """Return the kernels of a plain RNN and of its gradient."""

    def forward_kernel(gates: Any, weight: Any, hidden: Any, reverse: bool) -> torch.Tensor:  # noqa: FBT001
        return _computed(
            lambda *tensors, reverse: (meaning(*tensors, reverse=reverse),),
            (gates, weight, hidden),
            reverse=reverse,
        )[0]

    def backward_kernel(
        grad: Any, grad_hidden: Any, states: Any, weight: Any, reverse: bool  # noqa: FBT001
    ) -> _Tensors:  # fmt: skip
        return _computed(backward, (grad, grad_hidden, states, weight), reverse=reverse)

    return forward_kernel, backward_kernel


_RNN_KERNELS = {
    "rnn_tanh": _rnn(rnn_tanh_of, rnn_tanh_backward_of),
    "rnn_relu": _rnn(rnn_relu_of, rnn_relu_backward_of),
}


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


def _rnn_types(gates: Any, _weight: Any, hidden: Any, *_reverse: Any) -> torch.Tensor:
    made: torch.Tensor = gates.new_empty((gates.shape[0] + 1, *hidden.shape))
    return made


def _rnn_backward_types(grad: Any, grad_hidden: Any, *_rest: Any) -> _Tensors:
    return grad.new_empty(grad.shape), grad.new_empty(grad_hidden.shape)


# Name, arguments, number of results, implementation, its types.
_OPS: tuple[tuple[str, str, int, Any, Any], ...] = (
    ("lstm", "gates weight hidden cell", 3, _lstm, _lstm_types),
    (
        "lstm_backward",
        "grad grad_hidden grad_cell activated cells weight",
        3,
        _lstm_backward,
        _lstm_backward_types,
    ),
    ("gru", "gates weight bias hidden", 2, _gru, _gru_types),
    (
        "gru_backward",
        "grad grad_hidden activated states weight",
        3,
        _gru_backward,
        _gru_backward_types,
    ),
    *(
        op
        for name, (kernel, backward) in _RNN_KERNELS.items()
        for op in (
            (name, "gates weight hidden", 1, kernel, _rnn_types),
            (
                f"{name}_backward",
                "grad grad_hidden states weight",
                2,
                backward,
                _rnn_backward_types,
            ),
        )
    ),
)
for _name, _arguments, _count, _kernel, _types in _OPS:
    _results = ", ".join(["Tensor"] * _count)
    _given = ", ".join(f"Tensor {one}" for one in _arguments.split())
    define_op(f"{_name}({_given}, bool reverse) -> ({_results})", _kernel, _types)


def _of_weight(grad: torch.Tensor, states: torch.Tensor, *, reverse: bool) -> torch.Tensor:
    """Return the gradient of the weight of the previous states, over all steps at once."""
    previous = states[previous_slice(reverse=reverse)]
    return grad.flatten(0, 1).t() @ previous.flatten(0, 1)


class Lstm(torch.autograd.Function):
    """The op with a derivative that is an op too; the second derivative is plain PyTorch."""

    @staticmethod
    def forward(
        ctx: Any, gates: Any, weight: Any, hidden: Any, cell: Any, reverse: bool  # noqa: FBT001
    ) -> Any:  # fmt: skip
        """Return the output of the steps and the last states."""
        states, cells, activated = torch.ops.amp_ir.lstm(gates, weight, hidden, cell, reverse)
        ctx.save_for_backward(gates, weight, hidden, cell, states, cells, activated)
        ctx.reverse = reverse
        last = last_index(reverse=reverse)
        # Copies, which the capture drops: a tensor that a user may write to must not be a view.
        output = states[output_slice(reverse=reverse)].clone()
        return output, states[last].clone(), cells[last].clone()

    @staticmethod
    def backward(ctx: Any, grad: Any, grad_hidden: Any, grad_cell: Any) -> Any:
        """Return the gradient of each argument of `forward`."""
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


class Gru(torch.autograd.Function):
    """The GRU op, as `Lstm`; the bias of the state's matmul has its own gradient."""

    @staticmethod
    def forward(
        ctx: Any, gates: Any, weight: Any, bias: Any, hidden: Any, reverse: bool  # noqa: FBT001
    ) -> Any:  # fmt: skip
        """Return the output of the steps and the last states."""
        states, activated = torch.ops.amp_ir.gru(gates, weight, bias, hidden, reverse)
        ctx.save_for_backward(gates, weight, bias, hidden, states, activated)
        ctx.reverse = reverse
        output = states[output_slice(reverse=reverse)].clone()
        return output, states[last_index(reverse=reverse)].clone()

    @staticmethod
    def backward(ctx: Any, grad: Any, grad_hidden: Any) -> Any:
        """Return the gradient of each argument of `forward`."""
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


class Rnn(torch.autograd.Function):
    """The op of a plain RNN, `kind` "rnn_tanh" or "rnn_relu", as `Lstm`."""

    @staticmethod
    def forward(
        ctx: Any, kind: str, gates: Any, weight: Any, hidden: Any, reverse: bool  # noqa: FBT001
    ) -> Any:  # fmt: skip
        """Return the output of the steps and the last states."""
        states = getattr(torch.ops.amp_ir, kind)(gates, weight, hidden, reverse)
        ctx.save_for_backward(gates, weight, hidden, states)
        ctx.kind, ctx.reverse = kind, reverse
        output = states[output_slice(reverse=reverse)].clone()
        return output, states[last_index(reverse=reverse)].clone()

    @staticmethod
    def backward(ctx: Any, grad: Any, grad_hidden: Any) -> Any:
        """Return the gradient of each argument of `forward`."""
        gates, weight, hidden, states = ctx.saved_tensors
        reverse = ctx.reverse
        if torch.is_grad_enabled():
            forward_kernel, backward = _RNN_KERNELS[ctx.kind]
            states = forward_kernel(gates, weight, hidden, reverse)
        else:
            backward = getattr(torch.ops.amp_ir, f"{ctx.kind}_backward")
        of_gates, initial = backward(grad, grad_hidden, states, weight, reverse)
        of_weight = None
        if ctx.needs_input_grad[2]:
            of_weight = _of_weight(of_gates, states, reverse=reverse)
        return None, of_gates, of_weight, initial, None
