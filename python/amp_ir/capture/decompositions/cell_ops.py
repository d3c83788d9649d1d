# SPDX-License-Identifier: Apache-2.0
"""One call of an LSTM, GRU or RNN cell, and its gradient, as one op each: `amp_ir_cell.*`.

While a step is traced, `torch.lstm_cell`, `torch.gru_cell`, `torch.rnn_tanh_cell` and
`torch.rnn_relu_cell` are these ops, so that the capture finds the loops that call them
(cell_loops/). No such op is left in a captured step: a loop becomes a recurrent layer, and any
other call the smaller ops of its reference implementation here, which are PyTorch's own.

`low` is the dtype of the user's torch.autocast region around the call, or None.

Source: RNN.cpp of ATen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F

from amp_ir.capture.decompositions import recurrent_cells
from amp_ir.capture.decompositions.recurrent_layers import low_dtype, take_one_dtype
from amp_ir.capture.define_op import define_op

aten = torch.ops.aten
NAMESPACE = "amp_ir_cell"
_Tensors = tuple[torch.Tensor, ...]


@attrs.frozen
class CellKind:
    """A kind of cell: how many states it has, and the shapes of what it computes.

    The forward op takes (x, *states, w_ih, w_hh, b_ih, b_hh, low) and returns (*new states,
    workspace); a plain RNN has no workspace. The backward op takes (gradients of the new states, x,
    *states, forward results, w_ih, w_hh, low) and returns the gradients of x, of the states, of
    both weights and of both biases.
    """

    name: str
    gates: int
    state_count: int
    workspace_width: int
    forward: Callable[..., _Tensors] = attrs.field(eq=False)
    backward: Callable[..., _Tensors] = attrs.field(eq=False)

    @property
    def result_count(self) -> int:
        """Return the number of the forward op's results."""
        return self.state_count + bool(self.workspace_width)

    @property
    def forward_op(self) -> Any:
        """Return the op that a call is captured as."""
        return getattr(torch.ops.amp_ir_cell, self.name).default

    @property
    def backward_op(self) -> Any:
        """Return the op of its gradient."""
        return getattr(torch.ops.amp_ir_cell, f"{self.name}_backward").default


def _two_gates(x: Any, hidden: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input's and the state's part of the gates, [n, gates] each."""
    of_input, of_state, input_bias, hidden_bias, low = rest
    dtype = low or x.dtype

    def low_linear(value: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        return F.linear(value.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    return low_linear(x, of_input, input_bias), low_linear(hidden, of_state, hidden_bias)


def _of_gates(
    of_input: torch.Tensor,
    of_hidden: torch.Tensor,
    x: torch.Tensor,
    hidden: torch.Tensor,
    weights: Sequence[torch.Tensor],
    low: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, _Tensors]:
    """Return the gradients of x and of the hidden state by the gates, and of the parameters."""
    dtype = low or x.dtype
    of_input, of_hidden = of_input.to(dtype), of_hidden.to(dtype)
    of_weights = (
        (of_input.t() @ x.to(dtype)).to(weights[0].dtype),
        (of_hidden.t() @ hidden.to(dtype)).to(weights[1].dtype),
    )
    of_biases = (of_input.sum(0).to(weights[0].dtype), of_hidden.sum(0).to(weights[1].dtype))
    return (
        (of_input @ weights[0].to(dtype)).to(x.dtype),
        of_hidden @ weights[1].to(dtype),
        (*of_weights, *of_biases),
    )


def _lstm(x: Any, hidden: Any, cell: Any, *rest: Any) -> _Tensors:
    return recurrent_cells.lstm_cell(*_two_gates(x, hidden, *rest), cell)


def _lstm_backward(
    grad_hidden: Any, grad_cell: Any, x: Any, hidden: Any, cell: Any,
    new_hidden: Any, new_cell: Any, workspace: Any, of_input: Any, of_state: Any, low: Any,
) -> _Tensors:  # fmt: skip
    activated = workspace.to(torch.promote_types(workspace.dtype, new_cell.dtype))
    of_gates, of_cell, _ = recurrent_cells.lstm_cell_backward(
        grad_hidden.to(new_cell.dtype), grad_cell, cell, new_cell, activated, False
    )
    assert of_gates is not None
    assert of_cell is not None
    of_x, of_hidden, params = _of_gates(of_gates, of_gates, x, hidden, (of_input, of_state), low)
    return of_x, of_hidden.to(hidden.dtype), of_cell.to(cell.dtype), *params


def _gru(x: Any, hidden: Any, *rest: Any) -> _Tensors:
    return recurrent_cells.gru_cell(*_two_gates(x, hidden, *rest), hidden)


def _gru_backward(
    grad_hidden: Any, x: Any, hidden: Any, _new_hidden: Any, workspace: Any,
    of_input: Any, of_state: Any, low: Any,
) -> _Tensors:  # fmt: skip
    by_input, by_hidden, direct = recurrent_cells.gru_cell_backward(grad_hidden, workspace, False)[
        :3
    ]
    assert by_input is not None
    assert by_hidden is not None
    assert direct is not None
    of_x, of_hidden, params = _of_gates(by_input, by_hidden, x, hidden, (of_input, of_state), low)
    return of_x, (direct + of_hidden).to(hidden.dtype), *params


def _rnn(activate: Callable[..., torch.Tensor], x: Any, hidden: Any, *rest: Any) -> _Tensors:
    of_input, of_hidden = _two_gates(x, hidden, *rest)
    return (activate(of_hidden + of_input),)


def _rnn_backward(
    derivative: Callable[..., torch.Tensor], grad_hidden: Any, x: Any, hidden: Any,
    new_hidden: Any, of_input: Any, of_state: Any, low: Any,
) -> _Tensors:  # fmt: skip
    gates = derivative(grad_hidden, new_hidden)
    of_x, of_hidden, params = _of_gates(gates, gates, x, hidden, (of_input, of_state), low)
    return of_x, of_hidden.to(hidden.dtype), *params


def _of_relu(grad: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = aten.threshold_backward(grad, result, 0)
    return made


LSTM = CellKind("lstm", 4, 2, 4, _lstm, _lstm_backward)
GRU = CellKind("gru", 3, 1, 5, _gru, _gru_backward)
RNN_TANH = CellKind(
    "rnn_tanh", 1, 1, 0,
    functools.partial(_rnn, torch.tanh), functools.partial(_rnn_backward, aten.tanh_backward),
)  # fmt: skip
RNN_RELU = CellKind(
    "rnn_relu", 1, 1, 0,
    functools.partial(_rnn, torch.relu), functools.partial(_rnn_backward, _of_relu),
)  # fmt: skip
CELL_KINDS = (LSTM, GRU, RNN_TANH, RNN_RELU)


def _define(kind: CellKind) -> None:
    states = ["hidden", "cell"][: kind.state_count]
    results = [*(f"new_{one}" for one in states), *["workspace"][: bool(kind.workspace_width)]]
    weights = ["of_input", "of_state"]
    given = [f"Tensor {one}" for one in ["x", *states, *weights]]
    given += ["Tensor? input_bias", "Tensor? hidden_bias", "ScalarType? low"]
    above = [*(f"grad_{one}" for one in states), "x", *states, *results, *weights]
    backward = [f"Tensor {one}" for one in above] + ["ScalarType? low"]

    def types(x: Any, *rest: Any) -> Any:
        dtype = rest[-1] or x.dtype
        rows, width = rest[0].shape
        # A plain RNN's states are functions of two products alone, and have their dtype.
        promoted = torch.promote_types(dtype, rest[kind.state_count - 1].dtype)
        promoted = promoted if kind.workspace_width else dtype
        made = [x.new_empty((rows, width), dtype=promoted) for _ in states]
        if kind.workspace_width:
            saved = torch.promote_types(dtype, rest[0].dtype) if kind is GRU else dtype
            made.append(x.new_empty((rows, kind.workspace_width * width), dtype=saved))
        return made[0] if len(made) == 1 else tuple(made)

    def backward_types(*rest: Any) -> Any:
        count = kind.state_count
        *_, of_input, of_state, _low = rest
        x, *before = rest[count : 2 * count + 1]
        like = [x, *before, of_input, of_state]
        bias = [of_input.new_empty(of_input.shape[:1]), of_state.new_empty(of_state.shape[:1])]
        return (*(one.new_empty(one.shape) for one in like), *bias)

    def run(*rest: Any) -> Any:
        made = tuple(one.contiguous() for one in kind.forward(*rest))
        return made[0] if len(made) == 1 else made

    def run_backward(*rest: Any) -> Any:
        return tuple(one.clone() for one in kind.backward(*rest))

    backward_count = 1 + kind.state_count + 4
    for name, arguments, count, function, fake in (
        (kind.name, given, kind.result_count, run, types),
        (f"{kind.name}_backward", backward, backward_count, run_backward, backward_types),
    ):
        returned = ", ".join(["Tensor"] * count)
        schema = f"{name}({', '.join(arguments)}) -> ({returned})"
        define_op(schema, function, fake, namespace=NAMESPACE)


for _kind in CELL_KINDS:
    _define(_kind)


class _Cell(torch.autograd.Function):
    """The op with a derivative that is an op too; the second derivative is plain PyTorch."""

    @staticmethod
    def forward(ctx: Any, kind: CellKind, low: torch.dtype | None, *given: Any) -> Any:
        """Return the new states."""
        made = kind.forward_op(*given, low)
        made = (made,) if kind.result_count == 1 else tuple(made)
        ctx.save_for_backward(*given, *made)
        ctx.kind, ctx.low = kind, low
        # Copies, which the capture drops: the user may write to them, and the gradient reads them.
        states = tuple(one.clone() for one in made[: kind.state_count])
        return states[0] if len(states) == 1 else states

    @staticmethod
    def backward(ctx: Any, *above: Any) -> Any:
        """Return the gradient of each argument of `forward`."""
        kind, low = ctx.kind, ctx.low
        given, made = (
            ctx.saved_tensors[: -kind.result_count],
            ctx.saved_tensors[-kind.result_count :],
        )
        *read, of_input, of_state, _, _ = given
        if torch.is_grad_enabled():
            made = kind.forward(*given, low)
            found = kind.backward(*above, *read, *made, of_input, of_state, low)
        else:
            found = kind.backward_op(*above, *read, *made, of_input, of_state, low)
        needed = ctx.needs_input_grad[2:]
        return None, None, *(one if take else None for one, take in zip(found, needed, strict=True))


_FUNCTIONS: dict[Any, CellKind] = {
    torch.lstm_cell: LSTM,
    torch.gru_cell: GRU,
    torch.rnn_tanh_cell: RNN_TANH,
    torch.rnn_relu_cell: RNN_RELU,
}


def cell_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return the function that computes `func(*args)` for a call of a cell, or None.

    None leaves the call to PyTorch: it rejects it, or differentiates it in a transform of
    torch.func or in forward mode, where an op of ours has no derivative.
    """
    kind = _FUNCTIONS.get(func)
    if kind is None or kwargs or _is_transformed():
        return None
    given = list(args)
    if kind is LSTM and len(given) > 1 and isinstance(given[1], (tuple, list)):
        given[1:2] = given[1]
    given += [None] * (kind.state_count + 5 - len(given))
    if len(given) != kind.state_count + 5 or not _fit_together(kind, given):
        return None
    low = low_dtype(given[0])
    return lambda: _Cell.apply(kind, low, *given)


def _is_transformed() -> bool:
    transforms = torch._C._functorch.peek_interpreter_stack()
    return transforms is not None or torch.autograd.forward_ad._current_level >= 0


def _fit_together(kind: CellKind, given: Sequence[Any]) -> bool:
    """Return whether these are the arguments of a batch of rows, of fitting shapes and dtypes."""
    *required, input_bias, hidden_bias = given
    biases = [one for one in (input_bias, hidden_bias) if one is not None]
    if len(biases) == 1 or not all(isinstance(one, torch.Tensor) for one in (*required, *biases)):
        return False
    x, *states, of_input, of_state = required
    if any(one.dim() != 2 for one in required) or not take_one_dtype([*required, *biases]):
        return False
    rows, width = states[0].shape
    gates = kind.gates * width
    shapes = [one.shape for one in (*states, of_input, of_state, *biases)]
    wanted: list[tuple[int, ...]] = [(rows, width)] * len(states)
    wanted += [(gates, x.shape[1]), (gates, width)] + [(gates,)] * len(biases)
    return x.shape[0] == rows and [tuple(one) for one in shapes] == wanted
