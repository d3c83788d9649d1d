# SPDX-License-Identifier: Apache-2.0
"""Call the native recurrent layers, and what they are to give, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from amp_ir.host import native
from native_calls import shape

PREFIX = "amp_ir.onednn."
Tensors = list[torch.Tensor]


class Layer:
    """One layer's operands in a dtype, and where the results of each function go."""

    def __init__(self, kind: str, extents: tuple[int, int, int], dtype: torch.dtype) -> None:
        steps, rows, hidden = self.extents = extents
        self.kind, self.dtype = kind, dtype
        self.count = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}[kind]
        wide = self.count * hidden

        def normal(*dims: int) -> torch.Tensor:
            return torch.randn(*dims).to(dtype)

        self.gates = normal(steps, rows, wide)
        self.weight = (torch.randn(wide, hidden) / math.sqrt(hidden)).to(dtype)
        self.bias, self.hidden, self.cell = normal(wide), normal(rows, hidden), None
        if kind == "lstm":
            self.cell = torch.randn(rows, hidden)
        self.grad, self.grad_hidden = normal(steps, rows, hidden), normal(rows, hidden)
        self.grad_cell = torch.randn(rows, hidden)

    def operands(self) -> Tensors:
        last = self.cell if self.kind == "lstm" else self.hidden
        third = self.hidden if self.kind == "lstm" else self.bias
        if self.kind.startswith("rnn"):
            return [self.gates, self.weight, self.hidden]
        return [self.gates, self.weight, third, last]

    def results(self) -> Tensors:
        steps, rows, hidden = self.extents
        states = self._empty(steps + 1, rows, hidden)
        if self.kind.startswith("rnn"):
            return [states]
        activated = self._empty(steps, rows, 4 * hidden)
        if self.kind == "gru":
            return [states, activated]
        return [states, torch.full((steps + 1, rows, hidden), math.nan), activated]

    def backward_operands(self, results: Tensors) -> Tensors:
        if self.kind == "gru":
            states, activated = results
            return [self.grad, self.grad_hidden, activated, states, self.weight]
        if self.kind.startswith("rnn"):
            return [self.grad, self.grad_hidden, *results, self.weight]
        _, cells, activated = results
        return [self.grad, self.grad_hidden, self.grad_cell, activated, cells, self.weight]

    def backward_results(self) -> Tensors:
        steps, rows, hidden = self.extents
        gates = self._empty(steps, rows, self.count * hidden)
        state = self._empty(rows, hidden)
        if self.kind == "gru":
            return [gates, torch.clone(gates), state]
        if self.kind.startswith("rnn"):
            return [gates, state]
        return [gates, state, torch.full((rows, hidden), math.nan)]

    def _empty(self, *dims: int) -> torch.Tensor:
        return torch.full(dims, math.nan, dtype=self.dtype)


def given(operands: Tensors, extents: Sequence[int], is_reverse: bool, results: Tensors) -> Any:
    return [*operands, shape(tuple(extents)), int(is_reverse), *results]


def forward(layer: Layer, is_reverse: bool) -> Tensors:
    results = layer.results()
    arguments = given(layer.operands(), layer.extents, is_reverse, results)
    native.function(PREFIX + layer.kind)(*arguments)
    return results


def backward(layer: Layer, is_reverse: bool, saved: Tensors) -> Tensors:
    results = layer.backward_results()
    operands = layer.backward_operands(saved)
    arguments = given(operands, layer.extents, is_reverse, results)
    native.function(f"{PREFIX}{layer.kind}_backward")(*arguments)
    return results


class Order:
    """The times as a layer walks them, and which states are before and after each."""

    def __init__(self, steps: int, is_reverse: bool) -> None:
        self.times = range(steps - 1, -1, -1) if is_reverse else range(steps)
        self.before, self.after = (1, 0) if is_reverse else (0, 1)


def expected_forward(layer: Layer, is_reverse: bool) -> Tensors:
    """In float64, but for states, which products read: they are rounded as the functions do."""
    order, steps = Order(layer.extents[0], is_reverse), layer.extents[0]
    weight = layer.weight.double()
    states, cells = [torch.tensor(0.0)] * (steps + 1), [torch.tensor(0.0)] * (steps + 1)
    activated = [torch.tensor(0.0)] * steps
    first = order.times[0] + order.before
    states[first] = state = layer.hidden.double()
    cells[first] = torch.tensor(0.0) if layer.cell is None else layer.cell.double()
    for time in order.times:
        product = states[time + order.before] @ weight.T
        gates = layer.gates[time].double()
        if layer.kind == "lstm":
            parts = (gates + product).chunk(4, -1)
            i, f, o = (parts[k].sigmoid() for k in (0, 1, 3))
            m = parts[2].tanh()
            cell = f * cells[time + order.before] + i * m
            cells[time + order.after] = cell
            state, kept = o * cell.tanh(), (i, f, m, o)
        elif layer.kind.startswith("rnn"):
            state = (
                (gates + product).tanh() if layer.kind == "rnn_tanh" else (gates + product).relu()
            )
            kept = (state,)
        else:
            (a, b, c), (x, y, p) = gates.chunk(3, -1), (product + layer.bias.double()).chunk(3, -1)
            r, z = (a + x).sigmoid(), (b + y).sigmoid()
            n = (c + r * p).tanh()
            state, kept = n + z * (state - n), (r, z, n, p)
        states[time + order.after] = state.to(layer.dtype).double()
        activated[time] = torch.cat(kept, -1)
    if layer.kind.startswith("rnn"):
        return [torch.stack(states)]
    both = [torch.stack(states), torch.stack(activated)]
    return both if layer.kind == "gru" else [both[0], torch.stack(cells), both[1]]


def expected_backward(layer: Layer, is_reverse: bool, saved: Tensors) -> Tensors:
    """In float64, but for the gradients of gates, which products read."""
    order = Order(layer.extents[0], is_reverse)
    operands = [one.double() for one in layer.backward_operands(saved)]
    if layer.kind.startswith("rnn"):
        return _rnn_backward(order, layer, *operands)
    walk = _lstm_backward if layer.kind == "lstm" else _gru_backward
    return walk(order, layer.dtype, *operands)


def _lstm_backward(
    order: Order,
    dtype: torch.dtype,
    grad: torch.Tensor,
    grad_state: torch.Tensor,
    grad_cell: torch.Tensor,
    activated: torch.Tensor,
    cells: torch.Tensor,
    weight: torch.Tensor,
) -> Tensors:
    grad_gates = torch.zeros_like(activated)
    for time in reversed(order.times):
        i, f, m, o = activated[time].chunk(4, -1)
        total, bounded = grad[time] + grad_state, cells[time + order.after].tanh()
        grad_cell = grad_cell + total * o * (1 - bounded**2)
        parts = (
            grad_cell * m * i * (1 - i),
            grad_cell * cells[time + order.before] * f * (1 - f),
            grad_cell * i * (1 - m**2),
            total * bounded * o * (1 - o),
        )
        grad_gates[time] = torch.cat(parts, -1).to(dtype)
        grad_cell = grad_cell * f
        grad_state = grad_gates[time] @ weight
    return [grad_gates, grad_state, grad_cell]


def _gru_backward(
    order: Order,
    dtype: torch.dtype,
    grad: torch.Tensor,
    grad_state: torch.Tensor,
    activated: torch.Tensor,
    states: torch.Tensor,
    weight: torch.Tensor,
) -> Tensors:
    grad_gates = torch.zeros(*activated.shape[:2], weight.shape[0], dtype=torch.float64)
    grad_recurrent = torch.zeros_like(grad_gates)
    for time in reversed(order.times):
        r, z, n, p = activated[time].chunk(4, -1)
        total = grad[time] + grad_state
        of_z = total * (states[time + order.before] - n) * z * (1 - z)
        of_n = total * (1 - z) * (1 - n**2)
        of_r = of_n * p * r * (1 - r)
        grad_gates[time] = torch.cat((of_r, of_z, of_n), -1).to(dtype)
        grad_recurrent[time] = torch.cat((of_r, of_z, of_n * r), -1).to(dtype)
        grad_state = grad_recurrent[time] @ weight + total * z
    return [grad_gates, grad_recurrent, grad_state]


def _rnn_backward(
    order: Order,
    layer: Layer,
    grad: torch.Tensor,
    grad_state: torch.Tensor,
    states: torch.Tensor,
    weight: torch.Tensor,
) -> Tensors:
    grad_gates = torch.zeros_like(grad)
    for time in reversed(order.times):
        state, total = states[time + order.after], grad[time] + grad_state
        if layer.kind == "rnn_tanh":
            of_sum = total * (1 - state**2)
        else:
            of_sum = torch.where(state <= 0, 0.0, total)
        grad_gates[time] = of_sum.to(layer.dtype)
        grad_state = grad_gates[time] @ weight
    return [grad_gates, grad_state]
