# SPDX-License-Identifier: Apache-2.0
"""Decompose LSTM, GRU, plain RNN and their gradients: per step a matmul and a few elementwise ops.

All arithmetic is float32 (float64 for float64). What the op's results hold is rounded to their
dtypes, and a matmul reads the rounded state or gradient; cells, a GRU's state between two steps and
the gradients that a step hands to the one before are carried unrounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import tvm
from tvm import relax

from amp_ir.dialect import call_op
from amp_ir.dialect.recurrence import time_steps

Results = list[relax.Expr]
# The columns of one step, in groups.
Parts = Sequence[relax.Expr]


def wide_dtype(low: str) -> str:
    """Return the dtype of arithmetic and cells beside tensors of `low`."""
    return "float64" if low == "float64" else "float32"


@attrs.frozen(eq=False)
class StepWriter:
    """Emit ops that all carry the location of the op they replace.

    `low` is the dtype of what is stored, `wide` float32 (float64 for float64). `parts` has the
    values stacked before, step by step, in one or more groups of columns: a reader of one step
    reads the parts, and the whole may have no reader.
    """

    emit: Callable[[relax.Expr], relax.Var]
    span: tvm.ir.Span | None
    low: str
    wide: str
    parts: dict[relax.Var, Mapping[int, Parts]]

    def op(self, function: Callable[..., relax.Call], *args: Any, **options: Any) -> relax.Var:
        """Emit an op of Relax."""
        call = function(*args, **options)
        return self.emit(relax.Call(call.op, call.args, call.attrs, call.ty_args, self.span))

    def own(self, name: str, *args: relax.Expr, **options: Any) -> relax.Var:
        """Emit an op of the dialect."""
        return self.emit(call_op(f"amp_ir.{name}", list(args), self.span, **options))

    def cast(self, x: relax.Expr, dtype: str) -> relax.Expr:
        """Cast `x` to `dtype`."""
        return x if str(x.ty.dtype) == dtype else self.own("cast", x, dtype=dtype)

    def widen(self, x: relax.Expr) -> relax.Expr:
        """Widen `x` to the dtype of arithmetic."""
        return self.cast(x, self.wide)

    def add(self, x: relax.Expr, y: relax.Expr) -> relax.Var:
        """Compute x + y."""
        return self.op(relax.op.add, x, y)

    def subtract(self, x: relax.Expr, y: relax.Expr) -> relax.Var:
        """Compute x - y."""
        return self.op(relax.op.subtract, x, y)

    def multiply(self, *factors: relax.Expr) -> relax.Expr:
        """Multiply the factors, from the left."""
        product = factors[0]
        for factor in factors[1:]:
            product = self.op(relax.op.multiply, product, factor)
        return product

    def one_minus(self, x: relax.Expr) -> relax.Var:
        """Compute 1 - x."""
        return self.subtract(relax.const(1.0, self.wide), x)

    def matmul(self, a: relax.Expr, b: relax.Expr) -> relax.Var:
        """Compute a b, left in the dtype of its accumulation."""
        return self.op(relax.op.matmul, a, b, out_dtype=self.wide)

    def transposed(self, x: relax.Expr) -> relax.Var:
        """Compute x^T."""
        return self.op(relax.op.permute_dims, x, [1, 0])

    def at(self, x: relax.Expr, step: int) -> relax.Expr:
        """Return x[step], widened."""
        (whole,) = self.columns_at(x, step, 1)
        return whole

    def columns_at(self, x: relax.Expr, step: int, count: int) -> Parts:
        """Return the columns of x[step] in `count` equal parts, widened."""
        known = self.parts[x][step] if x in self.parts else ()
        if len(known) == count:
            return [self.widen(one) for one in known]
        part = self.op(relax.op.strided_slice, x, [0], [step], [step + 1])
        whole = self.widen(self.op(relax.op.reshape, part, _extents(x)[1:]))
        return [whole] if count == 1 else self.chunks(whole, count)

    def chunks(self, x: relax.Expr, count: int) -> Parts:
        """Return the columns of x [n, w] in `count` equal parts."""
        width = _extents(x)[1] // count
        return [
            self.op(relax.op.strided_slice, x, [1], [k * width], [(k + 1) * width])
            for k in range(count)
        ]

    def columns(self, parts: Sequence[relax.Expr]) -> relax.Var:
        """Concatenate columns: the inverse of `chunks`."""
        return self.op(relax.op.concat, list(parts), 1)

    def stack(self, by_step: Mapping[int, relax.Expr], dtype: str) -> relax.Var:
        """Stack the results of the steps to [t, ...], by their numbers."""
        return self.stack_columns({k: [one] for k, one in by_step.items()}, dtype)

    def stack_columns(self, by_step: Mapping[int, Parts], dtype: str) -> relax.Var:
        """Stack as `stack` does; each step made its columns in groups."""
        parts = {k: [self.cast(one, dtype) for one in by_step[k]] for k in sorted(by_step)}
        steps = [one[0] if len(one) == 1 else self.columns(one) for one in parts.values()]
        rows = [self.op(relax.op.reshape, one, (1, *_extents(one))) for one in steps]
        stacked = self.op(relax.op.concat, rows, 0) if len(rows) > 1 else rows[0]
        self.parts[stacked] = parts
        return stacked


def _extents(x: relax.Expr) -> tuple[int, ...]:
    return tuple(int(extent) for extent in x.ty.shape)


def _walk(steps: int, *, reverse: bool) -> list[tuple[int, int, int]]:
    """Return (step, where in the states it reads, where it writes), in the recurrence order."""
    walked = time_steps(steps, reverse=reverse)
    return [(k, k + 1, k) if reverse else (k, k, k + 1) for k in walked]


def lstm_steps(w: StepWriter, args: Sequence[relax.Expr], *, reverse: bool) -> Results:
    """Return the results of `amp_ir.lstm`."""
    gates, weight, hidden, cell = args
    of_state = w.transposed(weight)
    walk = _walk(_extents(gates)[0], reverse=reverse)
    states, cells = {walk[0][1]: hidden}, {walk[0][1]: w.widen(cell)}
    activated: dict[int, Parts] = {}
    for k, before, after in walk:
        both = w.add(w.matmul(states[before], of_state), w.at(gates, k))
        into, forget, made, out = w.chunks(both, 4)
        into, forget, out = (w.op(relax.op.sigmoid, one) for one in (into, forget, out))
        made = w.op(relax.op.tanh, made)
        cells[after] = w.add(w.multiply(forget, cells[before]), w.multiply(into, made))
        seen = w.op(relax.op.tanh, cells[after])
        states[after] = w.cast(w.multiply(out, seen), w.low)
        activated[k] = [into, forget, made, out]
    return [w.stack(states, w.low), w.stack(cells, w.wide), w.stack_columns(activated, w.low)]


def lstm_backward_steps(w: StepWriter, args: Sequence[relax.Expr], *, reverse: bool) -> Results:
    """Return the results of `amp_ir.lstm_backward`."""
    grad, grad_hidden, grad_cell, activated, cells, weight = args
    of_hidden, of_cell = w.widen(grad_hidden), w.widen(grad_cell)
    of_gates: dict[int, relax.Expr] = {}
    for k, before, after in reversed(_walk(_extents(grad)[0], reverse=reverse)):
        into, forget, made, out = w.columns_at(activated, k, 4)
        seen = w.op(relax.op.tanh, w.at(cells, after))
        of_state = w.add(w.at(grad, k), of_hidden)
        of_cell = w.add(of_cell, w.own("tanh_backward", w.multiply(of_state, out), seen))
        parts = [
            w.own("sigmoid_backward", w.multiply(of_cell, made), into),
            w.own("sigmoid_backward", w.multiply(of_cell, w.at(cells, before)), forget),
            w.own("tanh_backward", w.multiply(of_cell, into), made),
            w.own("sigmoid_backward", w.multiply(of_state, seen), out),
        ]
        of_gates[k] = w.cast(w.columns(parts), w.low)
        of_cell = w.multiply(of_cell, forget)
        of_hidden = w.matmul(of_gates[k], weight)
    return [w.stack(of_gates, w.low), w.cast(of_hidden, w.low), of_cell]


def gru_steps(w: StepWriter, args: Sequence[relax.Expr], *, reverse: bool) -> Results:
    """Return the results of `amp_ir.gru`."""
    gates, weight, bias, hidden = args
    of_state, bias = w.transposed(weight), w.widen(bias)
    walk = _walk(_extents(gates)[0], reverse=reverse)
    states, carried = {walk[0][1]: hidden}, w.widen(hidden)
    activated: dict[int, Parts] = {}
    for k, before, after in walk:
        from_state = w.chunks(w.add(w.matmul(states[before], of_state), bias), 3)
        from_input = w.chunks(w.at(gates, k), 3)
        reset = w.op(relax.op.sigmoid, w.add(from_input[0], from_state[0]))
        update = w.op(relax.op.sigmoid, w.add(from_input[1], from_state[1]))
        both = w.add(from_input[2], w.multiply(reset, from_state[2]))
        made = w.op(relax.op.tanh, both)
        carried = w.add(made, w.multiply(update, w.subtract(carried, made)))
        states[after] = w.cast(carried, w.low)
        activated[k] = [reset, update, made, from_state[2]]
    return [w.stack(states, w.low), w.stack_columns(activated, w.low)]


def gru_backward_steps(w: StepWriter, args: Sequence[relax.Expr], *, reverse: bool) -> Results:
    """Return the results of `amp_ir.gru_backward`."""
    grad, grad_hidden, activated, states, weight = args
    of_hidden = w.widen(grad_hidden)
    of_gates: dict[int, relax.Expr] = {}
    of_recurrent: dict[int, relax.Expr] = {}
    for k, before, _after in reversed(_walk(_extents(grad)[0], reverse=reverse)):
        reset, update, made, from_state = w.columns_at(activated, k, 4)
        of_state = w.add(w.at(grad, k), of_hidden)
        change = w.subtract(w.at(states, before), made)
        of_update = w.own("sigmoid_backward", w.multiply(of_state, change), update)
        of_made = w.own("tanh_backward", w.multiply(of_state, w.one_minus(update)), made)
        of_reset = w.own("sigmoid_backward", w.multiply(of_made, from_state), reset)
        of_gates[k] = w.columns([of_reset, of_update, of_made])
        recurrent = w.columns([of_reset, of_update, w.multiply(of_made, reset)])
        of_recurrent[k] = w.cast(recurrent, w.low)
        of_hidden = w.add(w.multiply(of_state, update), w.matmul(of_recurrent[k], weight))
    gradients = w.stack(of_gates, w.low), w.stack(of_recurrent, w.low)
    return [*gradients, w.cast(of_hidden, w.low)]


def rnn_steps(
    w: StepWriter,
    args: Sequence[relax.Expr],
    *,
    activation: Callable[[relax.Expr], relax.Call],
    reverse: bool,
) -> Results:
    """Return the result of `amp_ir.rnn_tanh` or `amp_ir.rnn_relu`."""
    gates, weight, hidden = args
    of_state = w.transposed(weight)
    walk = _walk(_extents(gates)[0], reverse=reverse)
    states: dict[int, relax.Expr] = {walk[0][1]: hidden}
    for k, before, after in walk:
        both = w.add(w.matmul(states[before], of_state), w.at(gates, k))
        states[after] = w.cast(w.op(activation, both), w.low)
    return [w.stack(states, w.low)]


def rnn_backward_steps(
    w: StepWriter, args: Sequence[relax.Expr], *, derivative: str, reverse: bool
) -> Results:
    """Return the results of either's gradient; `derivative` is the op of the activation's."""
    grad, grad_hidden, states, weight = args
    of_hidden = w.widen(grad_hidden)
    of_gates: dict[int, relax.Expr] = {}
    for k, _before, after in reversed(_walk(_extents(grad)[0], reverse=reverse)):
        of_state = w.add(w.at(grad, k), of_hidden)
        of_gates[k] = w.cast(w.own(derivative, of_state, w.at(states, after)), w.low)
        of_hidden = w.matmul(of_gates[k], weight)
    return [w.stack(of_gates, w.low), w.cast(of_hidden, w.low)]
