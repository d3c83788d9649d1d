# SPDX-License-Identifier: Apache-2.0
"""The cells of an LSTM or a GRU on a GPU: their formulas, and a step captured with them.

A CPU has none of these ops, but a capture runs none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

import amp_ir
from amp_ir.capture.decompositions import recurrent_cells

aten = torch.ops.aten
ROWS, WIDTH = 3, 5


def lstm_of_pytorch(
    x: torch.Tensor, h: torch.Tensor, *rest: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """What torch.nn.LSTMCell computes after its matmuls."""
    cell, *biases = rest
    into, forget, made, out = (x + h + sum(biases)).chunk(4, 1)
    new_cell = forget.sigmoid() * cell + into.sigmoid() * made.tanh()
    return out.sigmoid() * new_cell.tanh(), new_cell


def gru_of_pytorch(
    x: torch.Tensor, h: torch.Tensor, *rest: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """What torch.nn.GRUCell computes after its matmuls."""
    hidden, *biases = rest
    one, other = biases or (0.0, 0.0)
    from_x, from_h = (x + one).chunk(3, 1), (h + other).chunk(3, 1)
    reset, update = (from_x[0] + from_h[0]).sigmoid(), (from_x[1] + from_h[1]).sigmoid()
    made = (from_x[2] + reset * from_h[2]).tanh()
    return ((1 - update) * made + update * hidden,)


def operands(gates: int, *, has_bias: bool) -> list[torch.Tensor]:
    shapes = [(ROWS, gates * WIDTH), (ROWS, gates * WIDTH), (ROWS, WIDTH)]
    shapes += [(gates * WIDTH,), (gates * WIDTH,)] if has_bias else []
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def close(ours: object, theirs: object) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True)])
def test_an_lstm_cell_and_its_gradient(has_bias: bool, given: tuple[bool, bool]) -> None:
    inputs = operands(4, has_bias=has_bias)
    expected = lstm_of_pytorch(*inputs)
    found = recurrent_cells.lstm_cell(*[one.detach() for one in inputs])
    close(found[:2], tuple(one.detach() for one in expected))
    above = [
        torch.randn_like(one) if used else None for one, used in zip(expected, given, strict=True)
    ]
    used = [k for k, grad in enumerate(above) if grad is not None]
    wanted = torch.autograd.grad([expected[k] for k in used], inputs, [above[k] for k in used])
    gates, cell, bias = recurrent_cells.lstm_cell_backward(
        *above, inputs[2].detach(), found[1], found[2], has_bias
    )
    close([gates, gates, cell], list(wanted[:3]))
    assert (bias is not None) == has_bias
    if has_bias:
        close([bias, bias], list(wanted[3:]))


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_gru_cell_and_its_gradient(has_bias: bool) -> None:
    inputs = operands(3, has_bias=has_bias)
    (expected,) = gru_of_pytorch(*inputs)
    found, workspace = recurrent_cells.gru_cell(*[one.detach() for one in inputs])
    close(found, expected.detach())
    above = torch.randn_like(found)
    wanted = torch.autograd.grad(expected, inputs, above)
    gradients = recurrent_cells.gru_cell_backward(above, workspace, has_bias)
    assert [one is not None for one in gradients] == [True] * 3 + [has_bias] * 2
    close([one for one in gradients if one is not None], list(wanted))


class Recurrent(torch.nn.Module):
    """Two steps of a cell in time, made of the matmuls and what comes after them."""

    def __init__(self, gates: int, cell: Callable[..., tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        self.of_input = torch.nn.Linear(WIDTH, gates * WIDTH)
        self.of_hidden = torch.nn.Linear(WIDTH, gates * WIDTH)
        self.cell = cell

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = (x, x)
        for _ in range(2):
            gates = (x @ self.of_input.weight.t(), state[0] @ self.of_hidden.weight.t())
            biases = (self.of_input.bias, self.of_hidden.bias)
            state = (self.cell(*gates, state[-1], *biases) * 2)[:2]
        return state[0]


@pytest.mark.parametrize(
    ("gates", "fused", "plain"),
    [
        (4, lambda *given: aten._thnn_fused_lstm_cell(*given)[:2], lstm_of_pytorch),
        (3, lambda *given: aten._thnn_fused_gru_cell(*given)[:1], gru_of_pytorch),
    ],
    ids=["lstm", "gru"],
)
def test_a_step_with_a_gpus_cells_trains_as_pytorch(
    gates: int,
    fused: Callable[..., tuple[torch.Tensor, ...]],
    plain: Callable[..., tuple[torch.Tensor, ...]],
) -> None:
    eager = Recurrent(gates, plain)
    model = copy.deepcopy(eager)
    model.cell = fused
    x = torch.randn(ROWS, WIDTH)
    losses = []
    for one in (eager, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.3)

        def step(x: torch.Tensor, one=one, optimizer=optimizer) -> torch.Tensor:
            loss = one(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        if one is model:
            mod, _ = amp_ir.trace_step(lambda x: step(x), (x,), model=one, optimizer=optimizer)
            losses.append([amp_ir.compile(mod)(x).item() for _ in range(3)])
        else:
            losses.append([step(x).item() for _ in range(3)])
    # float32 sums in another order.
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
