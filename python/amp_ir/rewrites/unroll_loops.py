# SPDX-License-Identifier: Apache-2.0
"""Write the steps of a loop one after the other, for what cannot do loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm
from tvm import relax

from amp_ir.dialect.loop import CARRIED, ENTRY, NAME, Loop, loop_of
from amp_ir.ir.dataflow import Dataflow, replaced
from amp_ir.ir.loop_call import shape_of_type

Emit = Callable[[relax.Expr], relax.Var]


def has_loops(ir: tvm.IRModule) -> bool:
    """Return whether a step has loops."""
    return bool(Dataflow(ir).calls(NAME))


def unroll_loops(ir: tvm.IRModule, chosen: Callable[[Loop], bool] = lambda _: True) -> tvm.IRModule:
    """Replace loops, or those that are `chosen`, by the ops of all their steps.

    Before:  y = amp_ir.loop(h0, x)             # its body: (h, x) -> tanh(h + x)
    After:   h1 = tanh(h0 + x[0]); h2 = tanh(h1 + x[1]); ...; y = stack(h1, h2, ...)

    Ensures:  the same values; every op has the location that it has in the body.
    """
    flow = Dataflow(ir)
    wanted = {var for var, call in flow.calls(NAME).items() if chosen(loop_of(call))}
    if not wanted:
        return ir
    builder = relax.BlockBuilder()
    new: list[relax.VarBinding] = []
    results_of: dict[relax.Var, list[relax.Expr]] = {}
    now: dict[relax.Var, relax.Expr] = {}

    def emit(expr: relax.Expr) -> relax.Var:
        value = builder.normalize(expr)
        variable = relax.DataflowVar(f"step{len(new)}", value.ty)
        new.append(relax.VarBinding(variable, value))
        return variable

    for binding in flow.bindings:
        value = binding.value
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in results_of:
            now[binding.var] = results_of[value.tuple_value][value.index]
        elif binding.var in wanted:
            operands = [now.get(one, one) for one in value.args]
            results = _unrolled(loop_of(value), operands, value.span, emit)
            if isinstance(value.ty, relax.TupleType):
                results_of[binding.var] = results
            else:
                (now[binding.var],) = results
        else:
            new.append(relax.VarBinding(binding.var, replaced(value, now)))
    return flow.finish(new, replaced(flow.result, now))


def _unrolled(
    loop: Loop, operands: Sequence[relax.Expr], span: tvm.ir.Span | None, emit: Emit
) -> list[relax.Expr]:
    stacked: list[dict[int, relax.Expr]] = [{} for _ in loop.outputs]
    now: list[relax.Expr] = []
    for step in range(loop.length):
        given = []
        for operand, (kind, first, stride) in zip(operands, loop.inputs, strict=True):
            if kind == ENTRY:
                given.append(_entry(operand, first + stride * step, span, emit))
            else:
                given.append(now[first] if kind == CARRIED and step else operand)
        now = _inlined(loop.body, given, emit)
        for made, one, (_, first, stride) in zip(stacked, now, loop.outputs, strict=True):
            made[first + stride * step] = one
    return [
        _stack([made[k] for k in range(loop.length)], span, emit) if kind == ENTRY else last
        for made, last, (kind, _, _) in zip(stacked, now, loop.outputs, strict=True)
    ]


def _inlined(body: tvm.IRModule, given: Sequence[relax.Expr], emit: Emit) -> list[relax.Expr]:
    """Write the ops of a body, and return its outputs."""
    flow = Dataflow(body)
    now: dict[relax.Var, relax.Expr] = dict(zip(flow.main.params, given, strict=True))
    for binding in flow.bindings:
        value = replaced(binding.value, now)
        if binding.var is not flow.result:
            now[binding.var] = value if isinstance(value, relax.Var) else emit(value)
    return [replaced(field, now) for field in flow.fields]


def _located(call: relax.Call, span: tvm.ir.Span | None) -> relax.Call:
    return relax.Call(call.op, call.args, call.attrs, call.ty_args, span)


def _entry(whole: relax.Expr, index: int, span: tvm.ir.Span | None, emit: Emit) -> relax.Expr:
    part = relax.op.strided_slice(whole, [0], [index], [index + 1], [1])
    one = emit(_located(part, span))
    return emit(_located(relax.op.reshape(one, shape_of_type(one.ty)[1:]), span))


def _stack(parts: Sequence[relax.Expr], span: tvm.ir.Span | None, emit: Emit) -> relax.Expr:
    rows = [
        emit(_located(relax.op.reshape(one, (1, *shape_of_type(one.ty))), span)) for one in parts
    ]
    return emit(_located(relax.op.concat(rows, 0), span))
