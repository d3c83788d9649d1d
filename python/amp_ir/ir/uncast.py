# SPDX-License-Identifier: Apache-2.0
"""Undo autocast: the proof that it changed dtypes and nothing else.

`uncast(autocast(mod))` is bit-identical to `mod`: it drops every inserted cast, and every result
that was stored low is float32 again. The user's own casts stay.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.ir import GenericConst

from amp_ir.dialect.loop import NAME as LOOP
from amp_ir.dialect.registry import call_op, options_of
from amp_ir.ir.call_attributes import AMP_DTYPE, attribute_fields
from amp_ir.ir.dataflow import Dataflow, op_name
from amp_ir.ir.step_graph import VIEWS

FULL_DTYPE = "float32"
LOW_DTYPES = ("float16", "bfloat16")


def uncast(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module with float32 wherever autocast chose a low dtype.

    Its nodes are those of the module before autocast; views may be bound in another order.
    """
    flow = Dataflow(mod)
    uncaster = _Uncaster()
    for variable, value in flow.values.items():
        uncaster.bind(variable, value)
    new = flow.finish(uncaster.bindings, uncaster.read(flow.result))
    new.update_func(new.get_global_var("main"), new["main"].without_attr(AMP_DTYPE))
    return new


class _Uncaster:
    def __init__(self) -> None:
        self.bindings: list[relax.Binding] = []
        self.now: dict[relax.Var, relax.Expr] = {}
        self.views: dict[tuple[str, relax.Expr], relax.Var] = {}
        self.builder = relax.BlockBuilder()

    def bind(self, variable: relax.Var, value: relax.Expr) -> None:
        name = op_name(value)
        if name == "amp_ir.cast":
            self.now[variable] = self.read(value.args[0])
            return
        new = self.call(value) if name else self.read(value)
        # Autocast repeats a view, under its name, for each dtype that is read through it.
        key = (str(variable.name), new.args[0]) if name in VIEWS else None
        if key is not None and key in self.views:
            self.now[variable] = self.views[key]
            return
        bound = type(variable)(variable.name, new.ty)
        self.bindings.append(relax.VarBinding(bound, new))
        self.now[variable] = bound
        if key is not None:
            self.views[key] = bound

    def call(self, call: relax.Call) -> relax.Call:
        args = [self.read(argument) for argument in call.args]
        if op_name(call) == LOOP:
            return self.builder.normalize(_loop_before(call, args))
        was_low = any(
            before.ty.dtype != after.ty.dtype
            for before, after in zip(call.args, args, strict=True)
            if isinstance(before.ty, relax.TensorType)
        )
        if was_low:
            args = [_widen_constant(argument) for argument in args]
        attributes = call.attrs
        stated = str(getattr(attributes, "out_dtype", "") or "")
        # Autocast also states a low result for a call that reads float32.
        is_stored_low = stated in LOW_DTYPES and not any(
            str(one.ty.dtype) == stated for one in args if isinstance(one.ty, relax.TensorType)
        )
        if (was_low and stated in (FULL_DTYPE, *LOW_DTYPES)) or is_stored_low:
            attributes = _with_own_result(call)
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


def _loop_before(call: relax.Call, args: list[relax.Expr]) -> relax.Call:
    """Return a loop with the body that it had before autocast."""
    options = options_of(call)
    body = str(options["uncast"]) or str(options["body"])
    return call_op(LOOP, args, call.span, **{**options, "body": body, "uncast": ""})


def _widen_constant(expr: relax.Expr) -> relax.Expr:
    """Widen a constant to float32: autocast narrows only constants that the low dtype holds."""
    if isinstance(expr, GenericConst) and str(expr.ty.dtype) in LOW_DTYPES:
        return relax.const(expr.value.numpy().astype(FULL_DTYPE), FULL_DTYPE)
    return expr


def _with_own_result(call: relax.Call) -> tvm.ir.Attrs:
    """Return the attributes of a call whose result has the dtype of its arguments."""
    kind, fields = attribute_fields(call.attrs)
    return tvm.ir.make_node(kind, **{**fields, "out_dtype": None})
