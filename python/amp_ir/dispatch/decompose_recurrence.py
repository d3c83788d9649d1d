# SPDX-License-Identifier: Apache-2.0
"""Decompose LSTM, GRU and RNN layers into time steps, or turn them into a fused library call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import tvm
from tvm import relax

from amp_ir.dialect import call_op, options_of
from amp_ir.dialect.define import LOW_DTYPES
from amp_ir.dispatch.recurrence_call import (
    call_recurrence,
    recurrence_library,
    unsupported_recurrence_reason,
)
from amp_ir.dispatch.recurrence_steps import (
    Parts,
    Results,
    StepWriter,
    gru_backward_steps,
    gru_steps,
    lstm_backward_steps,
    lstm_steps,
    rnn_backward_steps,
    rnn_steps,
    wide_dtype,
)
from amp_ir.ir.dataflow import Dataflow, op_name, with_arguments
from amp_ir.ir.dispatch_log import DispatchLog
from amp_ir.ir.library_call import library_call

_EXPANSIONS: dict[str, Callable[..., Results]] = {
    "amp_ir.lstm": lstm_steps,
    "amp_ir.lstm_backward": lstm_backward_steps,
    "amp_ir.gru": gru_steps,
    "amp_ir.gru_backward": gru_backward_steps,
    "amp_ir.rnn_tanh": functools.partial(rnn_steps, activation=relax.op.tanh),
    "amp_ir.rnn_tanh_backward": functools.partial(rnn_backward_steps, derivative="tanh_backward"),
    "amp_ir.rnn_relu": functools.partial(rnn_steps, activation=relax.op.nn.relu),
    "amp_ir.rnn_relu_backward": functools.partial(rnn_backward_steps, derivative="relu_backward"),
}
OPS = tuple(_EXPANSIONS)
# Where an op takes cells or their gradient.
_CELLS = {"amp_ir.lstm": (3,), "amp_ir.lstm_backward": (2, 4)}
Emit = Callable[[relax.Expr], relax.Var]


def decompose_recurrence(
    ir: tvm.IRModule, *, libraries: tuple[str, ...] = (), log: DispatchLog | None = None
) -> tvm.IRModule:
    """Replace LSTM, GRU and RNN layers and their gradients by ops for each of their time steps.

    Where one of `libraries` has such an op fused, it becomes that call instead
    (recurrence_call.py).

    Before:  states, cells, activated = amp_ir.lstm(gates, weight, hidden, cell)
    After:   g = matmul(hidden, weight^T, out_dtype=f32) + gates[0]
             i, f, m, o = sigmoid(g[:h]), sigmoid(g[h:2h]), tanh(g[2h:3h]), sigmoid(g[3h:])
             c1 = f * cell + i * m; h1 = cast(o * tanh(c1), dtype of gates)
             ...                                              # so for every step
             states = concat(hidden, h1, ...); cells = concat(cell, c1, ...); activated = ...

    Requires: one function `main`, one dataflow block, static shapes.
    Ensures:  the numerics that recurrence_steps.py states; every new op has the location of the one
              that it replaces; results that nothing reads are not computed; the pass records each
              in `log`.
    """
    log = DispatchLog() if log is None else log
    parts: dict[relax.Var, Mapping[int, Parts]] = {}

    def replaced(call: relax.Call, emit: Emit) -> Results:
        name = op_name(call)
        library = recurrence_library(name.removeprefix("amp_ir."), libraries)
        reason = "no library that amp_ir calls does it whole"
        if library is not None:
            call = _with_wide_cells(call, emit)
            reason = unsupported_recurrence_reason(library, call)
            if not reason:
                log.add(name, library)
                whole = emit(call_recurrence(library, call))
                return _results_of(whole, emit)
        log.add(name, "matmuls and own kernels", reason)
        low = str(_types_of(call)[0].dtype)
        writer = StepWriter(emit, call.span, low, wide_dtype(low), parts)
        return _EXPANSIONS[name](writer, list(call.args), reverse=bool(options_of(call)["reverse"]))

    return _with_replaced(ir, replaced)


def _types_of(value: relax.Expr) -> list[relax.TensorType]:
    return list(value.ty.fields) if isinstance(value.ty, relax.TupleType) else [value.ty]


def _results_of(whole: relax.Var, emit: Emit) -> Results:
    if not isinstance(whole.ty, relax.TupleType):
        return [whole]
    return [emit(relax.TupleGetItem(whole, k)) for k in range(len(whole.ty.fields))]


def _with_wide_cells(call: relax.Call, emit: Emit) -> relax.Call:
    """Return the call with cells as libraries take them, where an override asked for low ones."""
    args = list(call.args)
    for k in _CELLS.get(op_name(call), ()):
        if str(args[k].ty.dtype) in LOW_DTYPES:
            args[k] = emit(call_op("amp_ir.cast", [args[k]], call.span, dtype="float32"))
    return with_arguments(call, args)


def recurrence_as_calls(ir: tvm.IRModule) -> tvm.IRModule:
    """Replace each such op by one external call, to find which kernels the rest becomes.

    Before:  states, cells, activated = amp_ir.lstm(gates, weight, hidden, cell)
    After:   states, cells, activated = call_dps_packed("amp_ir.lstm", (gates, weight, ...))
    """
    flow = Dataflow(ir)
    return flow.finish([_as_call(one) for one in flow.bindings]) if flow.calls(*OPS) else ir


def _as_call(binding: relax.VarBinding) -> relax.VarBinding:
    value = binding.value
    if op_name(value) not in _EXPANSIONS:
        return binding
    call = library_call(op_name(value), list(value.args), value.ty, value.span)
    return relax.VarBinding(binding.var, call)


def _with_replaced(
    ir: tvm.IRModule, replaced: Callable[[relax.Call, Emit], Results]
) -> tvm.IRModule:
    """Return the module with each op replaced by the results that `replaced` emits for it."""
    flow = Dataflow(ir)
    if not flow.calls(*OPS):
        return ir
    builder = relax.BlockBuilder()
    new: list[relax.VarBinding] = []

    def emit(expr: relax.Expr) -> relax.Var:
        value = builder.normalize(expr)
        variable = relax.DataflowVar(f"recurrence{len(new)}", value.ty)
        new.append(relax.VarBinding(variable, value))
        return variable

    results_of: dict[relax.Var, Results] = {}
    # Results under their old names, as others read them.
    now: dict[relax.Var, relax.Expr] = {}
    for binding in flow.bindings:
        value = binding.value
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in results_of:
            now[binding.var] = results_of[value.tuple_value][value.index]
            value = now[binding.var]
        elif op_name(value) in _EXPANSIONS:
            call = with_arguments(value, [now.get(one, one) for one in value.args])
            results = replaced(call, emit)
            if isinstance(call.ty, relax.TupleType):
                results_of[binding.var] = results
                value = builder.normalize(relax.Tuple(results))
            else:
                (value,) = results
                now[binding.var] = value
        new.append(relax.VarBinding(binding.var, value))
    return flow.finish(new)
