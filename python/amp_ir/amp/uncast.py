# SPDX-License-Identifier: Apache-2.0
"""Undo autocast: the proof that it changed dtypes and nothing else.

`uncast(autocast(mod))` is bit-identical to `mod`: it drops every inserted cast, and every result
that was stored low is float32 again. The user's own casts stay.
"""

from __future__ import annotations

from typing import TypeVar

import tvm
from tvm import relax
from tvm.ir import GenericConst

from amp_ir.amp.hints import FULL_DTYPE, LOW_DTYPES
from amp_ir.amp.rewrite import ATTRIBUTE, attribute_fields
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.step_module import StepModule

Module = TypeVar("Module", StepModule, tvm.IRModule)


def uncast(mod: Module) -> Module:
    """Return the module with float32 wherever autocast chose a low dtype (for tests)."""
    if isinstance(mod, StepModule):
        return mod.with_ir(uncast(mod.ir))
    flow = Dataflow(mod)
    uncaster = _Uncaster()
    for variable, value in flow.values.items():
        uncaster.bind(variable, value)
    output = uncaster.read(flow.result)
    last = relax.Var("outputs", output.ty)
    uncaster.bindings.append(relax.VarBinding(last, output))
    new = flow.finish(uncaster.bindings, last)
    new.update_func(new.get_global_var("main"), new["main"].without_attr(ATTRIBUTE))
    return new


class _Uncaster:
    def __init__(self) -> None:
        self.bindings: list[relax.Binding] = []
        self.now: dict[relax.Var, relax.Expr] = {}
        self.builder = relax.BlockBuilder()

    def bind(self, variable: relax.Var, value: relax.Expr) -> None:
        if isinstance(value, relax.Call) and value.op.name == "amp_ir.cast":
            self.now[variable] = self.read(value.args[0])
            return
        new = self.call(value) if isinstance(value, relax.Call) else self.read(value)
        bound = relax.DataflowVar(variable.name, new.ty)
        self.bindings.append(relax.VarBinding(bound, new))
        self.now[variable] = bound

    def call(self, call: relax.Call) -> relax.Call:
        args = [self.read(argument) for argument in call.args]
        was_low = any(
            before.ty.dtype != after.ty.dtype
            for before, after in zip(call.args, args, strict=True)
            if isinstance(before.ty, relax.TensorType)
        )
        if was_low:
            args = [_widen_constant(argument) for argument in args]
        attributes = call.attrs
        if str(getattr(attributes, "out_dtype", "") or "") in LOW_DTYPES and was_low:
            attributes = _with_full_result(call)
        new = relax.Call(call.op, args, attributes, list(call.ty_args), call.span)
        return self.builder.normalize(new)

    def read(self, expr: relax.Expr) -> relax.Expr:
        if isinstance(expr, relax.Var):
            return self.now.get(expr, expr)
        if isinstance(expr, relax.Tuple) and all(isinstance(f, relax.Expr) for f in expr.fields):
            return relax.Tuple([self.read(field) for field in expr.fields])
        if isinstance(expr, relax.TupleGetItem):
            return relax.TupleGetItem(self.read(expr.tuple_value), expr.index)
        return expr


def _widen_constant(expr: relax.Expr) -> relax.Expr:
    """Widen a constant to float32: autocast narrows only constants that the low dtype holds."""
    if isinstance(expr, GenericConst) and str(expr.ty.dtype) in LOW_DTYPES:
        return relax.const(expr.value.numpy().astype(FULL_DTYPE), FULL_DTYPE)
    return expr


def _with_full_result(call: relax.Call) -> tvm.ir.Attrs:
    """Return the attributes of a call with a float32 result."""
    kind, fields = attribute_fields(call.attrs)
    return tvm.ir.make_node(kind, **{**fields, "out_dtype": FULL_DTYPE})
