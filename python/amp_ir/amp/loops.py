# SPDX-License-Identifier: Apache-2.0
"""Autocast of the bodies of loops; casts that are the same at every step leave the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import tvm
from tvm import relax

from amp_ir.amp.hints import FULL_DTYPE, LOW_DTYPES
from amp_ir.dialect.loop import CARRIED, ENTRY, NAME, Loop, loop_of
from amp_ir.dialect.registry import call_op, options_of
from amp_ir.ir.dataflow import Dataflow, op_name, replaced
from amp_ir.ir.loop_body import step_of_body
from amp_ir.ir.step_module import Role, StepModule

_CAST = "amp_ir.cast"


def autocast_loops(
    ir: tvm.IRModule, autocast_body: Callable[[StepModule], tvm.IRModule]
) -> tvm.IRModule:
    """Use the low dtype inside of loops.

    Before:  y, h = amp_ir.loop(h0, w)           # its body: (h, w) -> matmul(h, w), ...
    After:   low = cast(w, "float16"); y, h = amp_ir.loop(h0, low)
             # its body: (h, low) -> matmul(cast(h, "float16"), low), ...

    - Values that a step hands on to the next one stay float32, as tensors of the state do.
    - What all steps read low only is cast before the loop, and what a step stores for after the
      loop is stored low where it was low.

    Requires: `autocast_body` keeps the dtypes of inputs and outputs.
    """
    return _Loops(ir, autocast_body).run() if Dataflow(ir).calls(NAME) else ir


class _Loops:
    def __init__(
        self, ir: tvm.IRModule, autocast_body: Callable[[StepModule], tvm.IRModule]
    ) -> None:
        self.flow = Dataflow(ir)
        self.autocast_body = autocast_body
        self.builder = relax.BlockBuilder()
        self.bindings: list[relax.VarBinding] = []
        # Loops by their names before, and what their results are now.
        self.loops: dict[relax.Var, relax.Var] = {}
        self.now: dict[relax.Var, relax.Expr] = {}

    def run(self) -> tvm.IRModule:
        for binding in self.flow.bindings:
            value = replaced(binding.value, self.now)
            if op_name(value) == NAME:
                loop = self._bind(binding.var.name, self._loop(value))
                self.loops[binding.var] = loop
                if not isinstance(loop.ty, relax.TupleType):
                    self._result(binding.var, loop, value.span)
            elif isinstance(value, relax.TupleGetItem) and value.tuple_value in self.loops:
                loop = self.loops[value.tuple_value]
                part = self._bind(binding.var.name, relax.TupleGetItem(loop, value.index))
                self._result(binding.var, part, self.flow.values[value.tuple_value].span)
            else:
                self.bindings.append(relax.VarBinding(binding.var, value))
        return self.flow.finish(self.bindings, replaced(self.flow.result, self.now))

    def _bind(self, stem: str, expr: relax.Expr) -> relax.Var:
        value = self.builder.normalize(expr)
        variable = relax.DataflowVar(stem, value.ty)
        self.bindings.append(relax.VarBinding(variable, value))
        return variable

    def _loop(self, call: relax.Call) -> relax.Call:
        before = loop_of(call)
        body = self.autocast_body(step_of_body(before, carried=Role.GRADIENT))
        loop = _with_casts_outside(attrs.evolve(before, body=body))
        loop = attrs.evolve(loop, uncast=str(options_of(call)["body"]))
        parameters = loop.body["main"].params
        operands = [
            self._cast("loop_input", operand, str(parameter.ty.dtype), call.span)
            for operand, parameter in zip(call.args, parameters, strict=True)
        ]
        return call_op(NAME, operands, call.span, **loop.options)

    def _result(self, before: relax.Var, part: relax.Var, span: tvm.ir.Span | None) -> None:
        self.now[before] = self._cast("loop_output", part, str(before.ty.dtype), span)

    def _cast(
        self, stem: str, value: relax.Expr, dtype: str, span: tvm.ir.Span | None
    ) -> relax.Expr:
        if dtype == str(value.ty.dtype):
            return value
        return self._bind(stem, call_op(_CAST, [value], span, dtype=dtype))


def casts_around_loops(ir: tvm.IRModule) -> set[relax.Var]:
    """Return the casts of a step that `autocast_loops` wrote outside of the loops' bodies."""
    flow = Dataflow(ir)
    loops = flow.calls(NAME)
    read = {one for call in loops.values() for one in call.args if isinstance(one, relax.Var)}
    parts = {
        one
        for one, value in flow.values.items()
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in loops
    } | set(loops)
    return {
        one
        for one, call in flow.calls(_CAST).items()
        if (one in read and str(call.ty.dtype) in LOW_DTYPES)
        or (call.args[0] in parts and str(call.ty.dtype) == FULL_DTYPE)
    }


def _with_casts_outside(loop: Loop) -> Loop:
    """Return a loop whose inputs and results have the dtypes in which its steps use them."""
    flow = Dataflow(loop.body)
    parameters = list(flow.main.params)
    now: dict[relax.Var, relax.Expr] = {}
    for k, (kind, _, _) in enumerate(loop.inputs):
        if kind == CARRIED:
            continue
        dtype = _only_low_dtype(flow, parameters[k])
        if dtype:
            low = relax.Var(parameters[k].name, relax.TensorType(parameters[k].ty.shape, dtype))
            now |= dict.fromkeys(flow.readers[parameters[k]], low)
            parameters[k] = low
    bindings = [
        relax.VarBinding(one.var, replaced(one.value, now))
        for one in flow.bindings
        if one.var not in now
    ]
    fields = replaced(flow.values.get(flow.result, flow.result), now).fields
    fields = _low_outputs(loop, flow, list(fields))
    result = relax.BlockBuilder().normalize(relax.Tuple(fields))
    output = relax.Var("outputs", result.ty)
    bindings.append(relax.VarBinding(output, result))
    new = flow.finish(bindings, output)
    old = new["main"]
    main = relax.Function(parameters, old.body, result.ty, old.is_pure, old.attrs, old.span)
    new.update_func(new.get_global_var("main"), main)
    return attrs.evolve(loop, body=new)


def _only_low_dtype(flow: Dataflow, parameter: relax.Var) -> str:
    """Return the low dtype that all readers of a parameter cast it to; "" where there is none."""
    readers = [flow.values[one] for one in flow.readers.get(parameter, ())]
    if len(readers) != flow.uses[parameter] or any(op_name(one) != _CAST for one in readers):
        return ""
    dtypes = {str(options_of(one)["dtype"]) for one in readers}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= set(LOW_DTYPES) else ""


def _low_outputs(loop: Loop, flow: Dataflow, fields: Sequence[relax.Expr]) -> list[relax.Expr]:
    """Return the outputs without the casts that only widen what is stored for after the loop."""
    carried = {output for kind, output, _ in loop.inputs if kind == CARRIED}
    found = list(fields)
    for k, (kind, _, _) in enumerate(loop.outputs):
        maker = flow.values.get(found[k])
        if maker is None or kind != ENTRY or k in carried or op_name(maker) != _CAST:
            continue
        source = maker.args[0]
        if str(maker.ty.dtype) == FULL_DTYPE and str(source.ty.dtype) in LOW_DTYPES:
            found[k] = source
    return found
