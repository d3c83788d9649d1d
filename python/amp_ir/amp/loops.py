# SPDX-License-Identifier: Apache-2.0
"""Autocast of the bodies of loops; casts that are the same at every step leave the loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs
import tvm
from tvm import relax

from amp_ir.amp.hints import FULL_DTYPE, LOW_DTYPES
from amp_ir.amp.plan import CastPlan
from amp_ir.dialect.loop import CARRIED, ENTRY, NAME, Loop, loop_of
from amp_ir.dialect.registry import call_op, options_of
from amp_ir.ir.dataflow import Dataflow, op_name, replaced
from amp_ir.ir.loop_call import shape_of_type
from amp_ir.ir.step_graph import VIEWS

_CAST = "amp_ir.cast"


@attrs.frozen(eq=False)
class CastLoop:
    """A loop after autocast: its place among the loops of the step, its length, its body's plan."""

    number: int
    length: int
    plan: CastPlan


@attrs.frozen
class OutsideCast:
    """A cast beside a loop that its body would otherwise do at each step.

    Of the operand at position `operand`; where that is None, of what `reader` reads of the results.
    """

    number: int
    operand: int | None
    reader: str
    from_dtype: str
    to_dtype: str
    elements: int


@attrs.define(eq=False)
class CastLoops:
    """The loops of a step after autocast, and the casts that it wrote beside them."""

    loops: list[CastLoop] = attrs.field(factory=list)
    outside: dict[relax.Var, OutsideCast] = attrs.field(factory=dict)


def autocast_loops(
    ir: tvm.IRModule, autocast_body: Callable[[int, Loop], tuple[tvm.IRModule, CastPlan]]
) -> tuple[tvm.IRModule, CastLoops]:
    """Use the low dtype inside of loops.

    Before:  y, h = amp_ir.loop(h0, w)           # its body: (h, w) -> matmul(h, w), ...
    After:   low = cast(w, "float16"); y, h = amp_ir.loop(h0, low)
             # its body: (h, low) -> matmul(cast(h, "float16"), low), ...

    - Values that a step hands on to the next one stay float32, as tensors of the state do.
    - What all steps read low only is cast before the loop, and what a step stores for after the
      loop is stored low where it was low.

    `autocast_body` takes the number of a loop among those of the step.

    Requires: `autocast_body` keeps the dtypes of inputs and outputs.
    """
    run = _Loops(ir, autocast_body)
    return (run.run() if run.flow.calls(NAME) else ir), run.made


class _Loops:
    def __init__(
        self, ir: tvm.IRModule, autocast_body: Callable[[int, Loop], tuple[tvm.IRModule, CastPlan]]
    ) -> None:
        self.flow = Dataflow(ir)
        self.autocast_body = autocast_body
        self.builder = relax.BlockBuilder()
        self.bindings: list[relax.VarBinding] = []
        self.made = CastLoops()
        # Loops by their names before: what their results are now, and their numbers.
        self.loops: dict[relax.Var, tuple[relax.Var, int]] = {}
        self.now: dict[relax.Var, relax.Expr] = {}

    def run(self) -> tvm.IRModule:
        for binding in self.flow.bindings:
            value = replaced(binding.value, self.now)
            if op_name(value) == NAME:
                self._loop(binding.var, value)
            elif isinstance(value, relax.TupleGetItem) and value.tuple_value in self.loops:
                loop, number = self.loops[value.tuple_value]
                part = self._bind(binding.var.name, relax.TupleGetItem(loop, value.index))
                span = self.flow.values[value.tuple_value].span
                self._result(number, binding.var, part, span)
            else:
                self.bindings.append(relax.VarBinding(binding.var, value))
        return self.flow.finish(self.bindings, replaced(self.flow.result, self.now))

    def _bind(self, stem: str, expr: relax.Expr) -> relax.Var:
        value = self.builder.normalize(expr)
        variable = relax.DataflowVar(stem, value.ty)
        self.bindings.append(relax.VarBinding(variable, value))
        return variable

    def _loop(self, variable: relax.Var, call: relax.Call) -> None:
        before, number = loop_of(call), len(self.made.loops)
        body, plan = self.autocast_body(number, before)
        loop = _with_casts_outside(attrs.evolve(before, body=body))
        loop = attrs.evolve(loop, uncast=str(options_of(call)["body"]))
        left = Dataflow(loop.body).values
        records = zip(Dataflow(body).calls(_CAST), plan.casts, strict=True)
        inside = tuple(record for one, record in records if one in left)
        self.made.loops.append(CastLoop(number, loop.length, attrs.evolve(plan, casts=inside)))
        operands = [
            self._cast("loop_input", operand, str(parameter.ty.dtype), call.span, number, k)
            for k, (operand, parameter) in enumerate(
                zip(call.args, loop.body["main"].params, strict=True)
            )
        ]
        new = self._bind(variable.name, call_op(NAME, operands, call.span, **loop.options))
        self.loops[variable] = new, number
        if not isinstance(new.ty, relax.TupleType):
            self._result(number, variable, new, call.span)

    def _result(
        self, number: int, before: relax.Var, part: relax.Var, span: tvm.ir.Span | None
    ) -> None:
        dtype = str(before.ty.dtype)
        reader = self._reader(before)
        self.now[before] = self._cast("loop_output", part, dtype, span, number, None, reader)

    def _reader(self, variable: relax.Var) -> str:
        """Return the name of the first value that is computed from another; views are none."""
        while variable in self.flow.readers:
            variable = next(iter(self.flow.readers[variable]))
            if op_name(self.flow.values[variable]) not in (*VIEWS, _CAST):
                return str(variable.name)
        return ""

    def _cast(
        self,
        stem: str,
        value: relax.Expr,
        dtype: str,
        span: tvm.ir.Span | None,
        number: int,
        operand: int | None,
        reader: str = "",
    ) -> relax.Expr:
        before = str(value.ty.dtype)
        if dtype == before:
            return value
        variable = self._bind(stem, call_op(_CAST, [value], span, dtype=dtype))
        elements = math.prod(shape_of_type(value.ty))
        self.made.outside[variable] = OutsideCast(number, operand, reader, before, dtype, elements)
        return variable


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
    fields = [replaced(field, now) for field in flow.fields]
    fields = [now.get(one, one) for one in _low_outputs(loop, flow, fields)]
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
